"""Image classifiers as Hugging Face folders and as files with timm's names, from a run or from timm's weights.

A folder holds model.safetensors, config.json, preprocessor_config.json (the image processor: the centre crop of the
evaluation), code that needs torch and transformers but not this package, a model card, and the checksum of each.
"""

import json
from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gmlp_scale.checkpoint.saved_run import read_recipe, read_weights
from gmlp_scale.checkpoint.trained import MODEL_TYPE, ExportError, TrainedModelError, copy_weights
from gmlp_scale.data.augmentation import CENTRE_CROP
from gmlp_scale.export.carried_code import copy_sources
from gmlp_scale.export.folder import new_folder, without_local_places, write_model
from gmlp_scale.export.timm_weights import from_timm, to_timm
from gmlp_scale.models import ModelConfig, build_model, with_kernels
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.storage.files import create_file
from gmlp_scale.tasks.images import ImagesConfig

_BICUBIC = 3  # Pillow's number


@dataclass(frozen=True)
class TrainedClassifier:
    name: str
    model: ModelConfig
    patch_size: int
    """Pixels on a side of a patch."""
    classes: tuple[str, ...]
    weights: dict[str, Tensor]
    """Float32, by the parameter names of an ImageClassifier."""
    details: dict[str, Any]
    """Where the weights came from; JSON-able."""

    @property
    def image_size(self) -> int:
        return isqrt(self.model.sequence_length) * self.patch_size

    def build(self) -> ImageClassifier:
        """The model in float32, on the CPU, in evaluation mode."""
        model = build_model(self.model, head=partial(ImageClassifier, patch_size=self.patch_size), seed=None)
        copy_weights(model, self.weights)
        return model.eval()


def read_image_run(run_folder: str | Path, step: int | None = None) -> TrainedClassifier:
    """The newest good checkpoint of a run with `task: images`, or the one after `step`.

    Raises:
        TrainedModelError, CheckpointError, ConfigError: there is no such run or checkpoint, or it is of another task.
    """
    config = read_recipe(run_folder, ImagesConfig)
    checkpoint, weights = read_weights(run_folder, step)
    return TrainedClassifier(
        name=config.name,
        model=with_kernels(config.model, "auto"),
        patch_size=config.patch_size,
        classes=tuple(checkpoint.details["data"]["classes"]),
        weights=weights,
        details=checkpoint.provenance,
    )


def read_timm(path: Path) -> TrainedClassifier:
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
    classes = tuple(map(str, range(model.vocab_size)))
    return TrainedClassifier(path.stem, model, patch_size, classes, weights, {"timm": path.name})


def write_timm(trained: TrainedClassifier, path: Path) -> None:
    """Writes a new safetensors file with timm's names, whole or not at all.

    Raises:
        TrainedModelError: timm has no such model.
        ExportError: the file exists.
    """
    state = to_timm(trained.model, trained.weights, trained.patch_size)
    if path.exists():
        raise ExportError(f"{path} is there already: remove it, or name another file")
    create_file(path, save({name: tensor.contiguous() for name, tensor in state.items()}, metadata={"format": "pt"}))


def write_image_export(trained: TrainedClassifier, folder: Path) -> None:
    """Writes the folder whole or not at all. ExportError if it is not empty."""
    with new_folder(folder) as unfinished:
        write_model(unfinished, _config(trained), trained.weights)
        processor = json.dumps(_processor(trained), indent=2) + "\n"
        (unfinished / "preprocessor_config.json").write_text(processor, encoding="utf-8")
        copy_sources(unfinished, of_images=True)
        (unfinished / "README.md").write_text(_card(trained), encoding="utf-8")


def _config(trained: TrainedClassifier) -> dict[str, Any]:
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["GmlpScaleForImageClassification"],
        "auto_map": {
            "AutoConfig": "configuration_gmlp.GmlpScaleConfig",
            "AutoModelForImageClassification": "modeling_gmlp_images.GmlpScaleForImageClassification",
        },
        "dtype": "float32",
        **trained.model.model_dump(mode="json", exclude={"kernels"}),
        "patch_size": trained.patch_size,
        "image_size": trained.image_size,
        "id2label": dict(enumerate(trained.classes)),
        "label2id": {label: number for number, label in enumerate(trained.classes)},
        "details": without_local_places(trained.details),
    }


def _processor(trained: TrainedClassifier) -> dict[str, Any]:
    """The image processor of the evaluation: resizes the shorter side to image_size / 0.875, then crops the centre."""
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(trained.image_size / CENTRE_CROP)},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": trained.image_size, "width": trained.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _card(trained: TrainedClassifier) -> str:
    num_parameters = sum(tensor.numel() for tensor in trained.weights.values())
    model, size = trained.model, trained.image_size
    return f"""---
library_name: transformers
pipeline_tag: image-classification
tags:
- {model.kind}
---

# {trained.name}

A {model.display_name} for images of {size} x {size} in patches of {trained.patch_size} x {trained.patch_size}
("Pay Attention to MLPs", section 3): {num_parameters:,} parameters, {model.num_blocks} blocks and
{len(trained.classes):,} classes.

```python
from transformers import AutoImageProcessor, pipeline

processor = AutoImageProcessor.from_pretrained("THIS_FOLDER")
classify = pipeline("image-classification", "THIS_FOLDER", image_processor=processor, trust_remote_code=True)
print(classify("photo.jpg"))
```

The image processor takes the centre of the image, {CENTRE_CROP} of its shorter side, as the evaluation in training did.
"""
