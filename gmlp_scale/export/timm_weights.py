"""The weights of an image classifier under the names and in the shapes of timm's gmlp_s16_224 and the like."""

import re
from collections.abc import Mapping
from functools import partial
from math import isqrt

import torch
from torch import Tensor

from gmlp_scale.checkpoint.format import difference
from gmlp_scale.checkpoint.trained import TrainedModelError
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.models.gmlp import FUSED_GATING, GmlpConfig
from gmlp_scale.models.image_classifier import NUM_COLOURS, ImageClassifier

_OURS = {
    "stem.proj": "embedding",
    "blocks.#.norm": "blocks.#.norm",
    "blocks.#.mlp_channels.fc1": "blocks.#.expand",
    "blocks.#.mlp_channels.gate.norm": "blocks.#.gating.norm",
    "blocks.#.mlp_channels.gate.proj": "blocks.#.gating",
    "blocks.#.mlp_channels.fc2": "blocks.#.project",
    "norm": "norm",
    "head": "classifier",
}
"""The names of our modules by the names of timm's; # is the block's number."""
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_STEM = "stem.proj.weight"
"""The weight of a convolution, [D, 3, H, W]; ours is a matrix."""


def from_timm(state: Mapping[str, Tensor]) -> tuple[GmlpConfig, int, dict[str, Tensor]]:
    """The model, the pixels on a side of a patch, and our float32 weights of its ImageClassifier.

    Raises:
        TrainedModelError: naming what timm's state dict lacks, or has beside a gMLP or in another shape.
    """
    try:
        model = GmlpConfig(
            num_blocks=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
            d_model=state["norm.weight"].numel(),
            d_ffn=2 * state["blocks.0.mlp_channels.gate.norm.weight"].numel(),
            spatial="dense",
            sequence_length=state["blocks.0.mlp_channels.gate.proj.bias"].numel(),
            vocab_size=state["head.bias"].numel(),
        )
        patch_size = isqrt(state[_STEM].numel() // (NUM_COLOURS * model.d_model))
    except KeyError as error:
        raise TrainedModelError(f"the weights are not of a whole gMLP of timm: it lacks {error}") from None
    if isqrt(model.sequence_length) ** 2 != model.sequence_length:
        raise TrainedModelError(f"the gMLP is for {model.sequence_length} patches; needed: those of a square image")
    with torch.device("meta"):
        ours = build_model(model, head=partial(ImageClassifier, patch_size=patch_size))
    expected = _shapes(to_timm(model, dict(ours.named_parameters()), patch_size))
    if (found := _shapes(state)) != expected:
        raise TrainedModelError(f"the weights are not of timm's gMLP: {difference(found, expected)}")
    weights = {_renamed(name, _OURS): tensor.float() for name, tensor in state.items()}
    weights[_renamed(_STEM, _OURS)] = state[_STEM].float().flatten(1)
    return model, patch_size, weights


def to_timm(model: ModelConfig, weights: Mapping[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """timm's state dict from our weights of the model's ImageClassifier.

    Raises:
        TrainedModelError: timm has no such model.
    """
    if model.kind != "gmlp" or (model.spatial, model.gating) != ("dense", FUSED_GATING):
        needed = f"a gMLP with a free W and the split gate: train with model.spatial=dense model.gating={FUSED_GATING}"
        raise TrainedModelError(f"timm has only {needed}")
    state = {_renamed(name, _THEIRS): tensor for name, tensor in weights.items()}
    state[_STEM] = state[_STEM].unflatten(1, (NUM_COLOURS, patch_size, patch_size))
    return state


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", module)
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", module)
    return f"{modules[pattern].replace('#', number[0] if number else '')}.{kind}"
