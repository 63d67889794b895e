"""Image classifiers as Hugging Face folders and as files with timm's names, from a run or from timm's weights.

A folder holds model.safetensors, config.json, preprocessor_config.json (the image processor: the centre crop of the
evaluation), code that needs torch and transformers but not this package, a model card, and the checksum of each.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gmlp_scale.checkpoint.format import difference
from gmlp_scale.checkpoint.saved_run import read_recipe, read_weights
from gmlp_scale.checkpoint.trained import ExportError, TrainedModel, TrainedModelError, shapes_of
from gmlp_scale.data.augmentation import CENTRE_CROP
from gmlp_scale.errors import InputError
from gmlp_scale.export.card import render
from gmlp_scale.export.folder import json_text, new_export, transformers_config, without_local_places
from gmlp_scale.models import ModelConfig, build_model, with_kernels
from gmlp_scale.models.gmlp import GmlpConfig
from gmlp_scale.models.image_classifier import NUM_COLOURS, ImageClassifier
from gmlp_scale.storage.files import create_file, local_path, plain_place
from gmlp_scale.tasks.images import ImagesConfig

_BICUBIC = 3  # Pillow's number
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--run, --step and --timm, for read_chosen."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of a recipe with task: images")
    source.add_argument("--timm", type=local_path, metavar="FILE.safetensors", help="the weights of a gMLP of timm")
    parser.add_argument("--step", type=int, help="the run's checkpoint after this step (default: the newest good one)")


def read_chosen(options: argparse.Namespace) -> TrainedModel:
    """The run or timm's weights; raises as read_image_run and read_timm do."""
    if options.timm and options.step is not None:
        raise InputError("--step needs --run")
    return read_timm(options.timm) if options.timm else read_image_run(options.run, options.step)


def read_image_run(run_folder: str | Path, step: int | None = None) -> TrainedModel:
    """The newest good checkpoint of a run with `task: images`, or the one after `step`.

    Raises:
        TrainedModelError, CheckpointError, ConfigError: there is no such run or checkpoint, or it is of another task.
    """
    config = read_recipe(run_folder, ImagesConfig)
    checkpoint, weights = read_weights(run_folder, step)
    return TrainedModel(
        place=config.name,
        config=with_kernels(config.model, "auto"),
        head="image_classification",
        labels=tuple(checkpoint.details["data"]["classes"]),
        weights=weights,
        details=checkpoint.provenance,
        patch_size=config.patch_size,
    )


def read_timm(path: Path) -> TrainedModel:
    """A safetensors file of timm's gMLP. Its classes are named by their numbers.

    Raises:
        TrainedModelError, OSError: the file is no such file.
    """
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise TrainedModelError(f"{path} is no safetensors file ({error})") from error
    try:
        model, patch_size, weights = from_timm(state)
    except TrainedModelError as error:
        raise TrainedModelError(f"{path}: {error}") from None
    labels = tuple(map(str, range(model.vocab_size)))
    details = {"timm": path.name}
    return TrainedModel(path.stem, model, "image_classification", weights, details, labels, patch_size=patch_size)


def write_timm(trained: TrainedModel, path: Path) -> None:
    """Writes a new safetensors file with timm's names, whole or not at all.

    Raises:
        TrainedModelError: timm has no such model.
        ExportError: the file exists.
    """
    state = to_timm(trained.config, trained.weights, trained.patch_size)
    if path.exists():
        raise ExportError(f"{path} is there already: remove it, or name another file")
    create_file(path, save({name: tensor.contiguous() for name, tensor in state.items()}, metadata={"format": "pt"}))


def write_image_export(trained: TrainedModel, folder: Path) -> None:
    """Writes the folder whole or not at all. ExportError if it is not empty."""
    trained = replace(trained, details=without_local_places(trained.details))
    image_size = isqrt(trained.config.sequence_length) * trained.patch_size
    config = transformers_config(trained, patch_size=trained.patch_size, image_size=image_size)
    card = render("image_card.md", trained=trained, size=image_size, centre_crop=CENTRE_CROP)
    with new_export(folder, config, trained.weights, card, of_images=True) as unfinished:
        processor = json_text(_processor(image_size))
        (unfinished / "preprocessor_config.json").write_text(processor, encoding="utf-8")


def _processor(image_size: int) -> dict[str, Any]:
    """The image processor of the evaluation: resizes the shorter side to image_size / 0.875, then crops the centre."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(image_size / CENTRE_CROP)},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


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
    expected = shapes_of(to_timm(model, dict(ours.named_parameters()), patch_size))
    if (found := shapes_of(state)) != expected:
        raise TrainedModelError(f"the weights are not of timm's gMLP: {difference(found, expected)}")
    weights = {_renamed(name, _OURS): tensor.float() for name, tensor in state.items()}
    weights[_renamed(_STEM, _OURS)] = state[_STEM].float().flatten(1)
    return model, patch_size, weights


def to_timm(model: ModelConfig, weights: Mapping[str, Tensor], patch_size: int) -> dict[str, Tensor]:
    """timm's state dict from our weights of the model's ImageClassifier.

    Raises:
        TrainedModelError: timm has no such model.
    """
    form = {"spatial": "dense", "gating": "multiplicative_split", "mixed_share": 1.0}
    if model.kind != "gmlp" or any(getattr(model, field) != value for field, value in form.items()):
        fields = " ".join(f"model.{field}={value}" for field, value in form.items())
        raise TrainedModelError(f"timm has only a gMLP with a free W and the split gate: train with {fields}")
    state = {_renamed(name, _THEIRS): tensor for name, tensor in weights.items()}
    state[_STEM] = state[_STEM].unflatten(1, (NUM_COLOURS, patch_size, patch_size))
    return state


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    number = re.search(r"(?<=\.)\d+(?=\.)", module)
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "#", module)
    return f"{modules[pattern].replace('#', number[0] if number else '')}.{kind}"
