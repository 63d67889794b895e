"""The weights of an image classifier under the names and in the shapes of timm's gmlp_s16_224 and the like."""

import re
from collections.abc import Mapping

from torch import Tensor

from gmlp_scale.models.image_classifier import NUM_COLOURS
from gmlp_scale.trained import TrainedModelError

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
"""Our modules by timm's; # is the block's number."""
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_STEM = "stem.proj.weight"
"""A convolution's, [D, 3, H, W]; ours is a matrix."""


def from_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights of an ImageClassifier from timm's state dict.

    Raises:
        TrainedModelError: a name is not of timm's gMLP.
    """
    try:
        weights = {_renamed(name, _OURS): tensor for name, tensor in state.items()}
        weights[_renamed(_STEM, _OURS)] = state[_STEM].flatten(1)
    except KeyError as error:
        raise TrainedModelError(f"the weights are not of timm's gMLP: it has no {error}, or they have not") from None
    return weights


def to_timm(weights: Mapping[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """timm's state dict from our weights of a gMLP with a dense W and the split gate.

    Raises:
        TrainedModelError: the model is of another kind, so timm has nothing like it.
    """
    try:
        state = {_renamed(name, _THEIRS): tensor for name, tensor in weights.items()}
    except KeyError as error:
        raise TrainedModelError(f"timm's gMLP has nothing like {error}") from None
    if any(tensor.ndim != 2 for name, tensor in state.items() if name.endswith("gate.proj.weight")):
        raise TrainedModelError("timm's gMLP has a free W, and this one is Toeplitz: train with model.spatial=dense")
    state[_STEM] = state[_STEM].unflatten(1, (NUM_COLOURS, patch_size, patch_size))
    return state


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """Raises KeyError if no module has such a parameter."""
    module, _, kind = name.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", module)
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", module)
    if kind not in ("weight", "bias") or pattern not in modules:
        raise KeyError(name)
    return f"{modules[pattern].replace('#', number[0] if number else '')}.{kind}"
