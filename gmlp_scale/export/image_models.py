"""Image classifiers as Hugging Face folders and as files with timm's names, from a run or from timm's weights.

A folder holds model.safetensors, config.json, preprocessor_config.json (the image processor: the centre crop of the
evaluation), code that needs torch and transformers but not this package, a model card, and the checksum of each.
"""

import argparse
import json
from math import isqrt
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from gmlp_scale.checkpoint.saved_run import read_recipe, read_weights
from gmlp_scale.checkpoint.trained import ExportError, TrainedModel, TrainedModelError
from gmlp_scale.data.augmentation import CENTRE_CROP
from gmlp_scale.errors import InputError
from gmlp_scale.export.card import render
from gmlp_scale.export.folder import new_export, transformers_config, without_local_places
from gmlp_scale.export.timm_weights import from_timm, to_timm
from gmlp_scale.models import with_kernels
from gmlp_scale.storage.files import create_file, local_path
from gmlp_scale.tasks.images import ImagesConfig

_BICUBIC = 3  # Pillow's number


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--run, --step and --timm, for read_chosen."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="RUN_DIR_OR_URL", help="a run of a recipe with task: images")
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
    return TrainedModel(path.stem, model, "image_classification", labels, weights, details, patch_size=patch_size)


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
    model, image_size = trained.config, isqrt(trained.config.sequence_length) * trained.patch_size
    sizes = {"patch_size": trained.patch_size, "image_size": image_size}
    config = transformers_config(model, trained.head, trained.labels, **sizes)
    config["details"] = without_local_places(trained.details)
    card = render(
        "image_card.md",
        name=trained.place,
        model=model,
        size=image_size,
        patch_size=trained.patch_size,
        num_parameters=sum(tensor.numel() for tensor in trained.weights.values()),
        num_classes=len(trained.labels),
        centre_crop=CENTRE_CROP,
    )
    with new_export(folder, config, trained.weights, card, of_images=True) as unfinished:
        processor = json.dumps(_processor(image_size), indent=2) + "\n"
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
