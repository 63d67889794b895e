"""A trained model with all that it needs, and reading one from an export. saved_run.py reads one from a run.

gmlp_scale/export/folder.py describes an export's folder. Only safetensors and JSON are read: nothing in a downloaded
folder is run or unpickled.
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gmlp_scale.checkpoint.format import difference
from gmlp_scale.checkpoint.modernbert import MODERNBERT, from_modernbert
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.errors import InputError, validation_problems
from gmlp_scale.models import FAMILIES, ModelConfig, build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.models.task_heads import SequenceClassifier, SpanPredictor, TokenTagger
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import download_file, is_url, list_files, read_json, redacted

log = logging.getLogger(__name__)

Head = Literal[
    "masked_language_model",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
]

MODEL_TYPE = "gmlp_scale"
PREFIX = "model."
"""Parameter names in exports begin with it."""
WEIGHTS_NAME = "model.safetensors"
CHECKSUMS_NAME = "SHA256SUMS"
"""Lines `checksum  file name`, as sha256sum writes them. transformers ignores the file."""
CLASS_OF_HEAD: dict[Head, str] = {
    "masked_language_model": "GmlpScaleForMaskedLM",
    "sequence_classification": "GmlpScaleForSequenceClassification",
    "token_classification": "GmlpScaleForTokenClassification",
    "question_answering": "GmlpScaleForQuestionAnswering",
}


class _Details(BaseModel):
    """The parts of an export's details that are read."""

    step: int | None = None
    config: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    pretrained: "_Details | None" = None


class _BesideTheModel(BaseModel):
    """The types of what is read of config.json beside the model's own fields."""

    id2label: dict[str, str] = {"0": "LABEL_0", "1": "LABEL_1"}
    """transformers does not write its own default, the names of two classes."""
    row_length: PositiveInt | None = None
    details: _Details = _Details()


class TrainedModelError(InputError):
    """A trained model does not have what was asked for."""


class ExportError(InputError):
    """A folder is not an export, or an export cannot be written to it."""


@dataclass(frozen=True)
class TrainedModel:
    place: str
    """The checkpoint's or the export's folder: a path or a URL."""
    config: ModelConfig
    head: Head
    weights: dict[str, Tensor]
    """Float32 on the CPU, by the parameter names of `build()`."""
    details: dict[str, Any]
    """Where the weights came from; for a pretraining run its config, data and step."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a classification head, in the order of its logits; else empty."""
    tokenizer_folder: str = ""
    tokenizer_sha256: str = ""
    """Both are empty for a model of images."""
    patch_size: int | None = None
    """Pixels on a side of a patch, for a model of images."""
    row_length: int | None = None
    """The length to which finetuning padded rows; None for a pretrained model."""
    recipe: RunConfig | None = None
    """The pretraining run's on text; None for an export without one, such as a finetuned model's."""

    @property
    def step(self) -> int | None:
        """The pretraining step; None if an export does not say."""
        return self.details.get("step")

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.weights.values())

    @property
    def num_evaluation_rows(self) -> int:
        """How many held-out rows the pretraining run evaluated on at this step."""
        details = self.details
        return min(details["config"]["train"]["num_evaluation_rows"], details["data"]["heldout_rows"])

    def build(self) -> Backbone:
        """The model with its head, float32, on the CPU, in evaluation mode."""
        head = head_class(self.head, len(self.labels), self.patch_size)
        model = build_model(self.config, head=head, seed=None)
        copy_weights(model, self.weights)
        return model.eval()

    def tokenizer(self) -> Tokenizer:
        """Raises TrainedModelError if the folder is gone or now holds another tokenizer."""
        try:
            tokenizer = Tokenizer(self.tokenizer_folder)
        except FileNotFoundError as error:
            raise TrainedModelError(
                f"{error}. {self.place} was trained with that folder's: if it is gone, put it back; if the path is "
                "relative, start this in the folder in which the training was started"
            ) from error
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise TrainedModelError(
                f"{self.tokenizer_folder} is not the tokenizer that {self.place} was trained with: put that one back"
            )
        return tokenizer


@torch.no_grad()
def copy_weights(model: Backbone, weights: Mapping[str, Tensor]) -> None:
    """Copies each weight into the model's parameter of the same name."""
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)


def read_export(folder: str | Path) -> TrainedModel:
    """Reads a folder of write_export, or of transformers' save_pretrained with tokenizer.model copied into it.

    A ModernBERT's folder is read too, with the tokenizer.model that its model is to have here.

    Raises:
        FileNotFoundError, InputError: naming the file and what is wrong with it, such as its checksum.
    """
    if is_url(folder):
        return _read_remote_export(str(folder))
    folder = Path(folder)
    _check_files(folder)
    config = _read_config(folder / "config.json")
    beside = _checked(_BesideTheModel, config, folder)
    tokenizer, weights = Tokenizer(folder), _read_weights(folder)
    if config["model_type"] == MODERNBERT:
        head = "masked_language_model"
        model, weights = _from_modernbert(config, weights, folder, tokenizer)
        if config.get("tokenizer_sha256") != tokenizer.sha256:  # else the head does no more than its norm's gains
            log.warning("%s is a ModernBERT: its head is left out, so it fills no mask before it is trained", folder)
    else:
        names = {name for family in FAMILIES.values() for name in family.model_fields}
        model = _checked(ModelConfig, {name: config[name] for name in names if name in config}, folder)
        head = _head(config, folder)
    labels = tuple(beside.id2label.values()) if head in ("sequence_classification", "token_classification") else ()
    if tokenizer.vocab_size != model.vocab_size:
        raise ExportError(
            f"{folder}: {MODEL_NAME} has {tokenizer.vocab_size} pieces but config.json says vocab_size "
            f"{model.vocab_size}: they are not of one export"
        )
    expected = expected_shapes(model, head, len(labels))
    found = shapes_of(weights)
    if found != expected:
        raise ExportError(f"{folder}: the weights are not of config.json's model: {difference(found, expected)}")
    details = config.get("details", {})
    return TrainedModel(
        place=str(folder),
        config=model,
        head=head,
        labels=labels,
        weights=weights,
        tokenizer_folder=str(folder),
        tokenizer_sha256=tokenizer.sha256,
        row_length=beside.row_length,
        details=details,
        recipe=recipe_in(details),
    )


def _from_modernbert(
    config: dict[str, Any], weights: dict[str, Tensor], folder: Path, tokenizer: Tokenizer
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """`from_modernbert`, whose errors become ExportErrors."""
    try:
        return from_modernbert(config, weights, folder, tokenizer)
    except (InputError, ValidationError) as error:
        raise ExportError(f"{folder} cannot be read as a ModernBERT: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        found = f"{folder} cannot be read as a ModernBERT ({error!r})"
        raise ExportError(f"{found}: a field or a weight is missing or of another type; copy it again") from error


def _read_remote_export(url: str) -> TrainedModel:
    """Reads a copy on this machine, which is deleted afterwards."""
    with tempfile.TemporaryDirectory() as copy:
        for name in list_files(url):
            if "/" not in name:
                download_file(f"{url}/{name}", Path(copy, name))
        try:
            export = read_export(copy)
        except (FileNotFoundError, InputError) as error:
            raise type(error)(redacted(str(error).replace(copy, url))) from error
    return replace(export, place=redacted(url), tokenizer_folder=url)


def recipe_in(details: dict[str, Any]) -> RunConfig | None:
    """The recipe of the pretraining run that gave these weights; None if the details of an export hold none."""
    try:
        return RunConfig.model_validate(details.get("config"))
    except ValidationError:
        return None


def head_class(head: Head, num_classes: int, patch_size: int | None = None) -> Callable[..., Backbone]:
    """The `head` argument of build_model; only classification uses num_classes, and only images patch_size."""
    match head:
        case "masked_language_model":
            return MaskedLanguageModel
        case "sequence_classification":
            return partial(SequenceClassifier, num_classes=num_classes)
        case "token_classification":
            return partial(TokenTagger, num_classes=num_classes)
        case "question_answering":
            return SpanPredictor
        case "image_classification":
            return partial(ImageClassifier, patch_size=patch_size)


def expected_shapes(model: ModelConfig, head: Head, num_classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of a model with its head, by name."""
    with torch.device("meta"):
        return shapes_of(dict(build_model(model, head=head_class(head, num_classes)).named_parameters()))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_files(folder: Path) -> None:
    """Raises ExportError naming a file that does not have its checksum. Only files that are read here are checked."""
    sums = folder / CHECKSUMS_NAME
    paths = [path for path in (folder / "config.json", folder / MODEL_NAME, *_weight_files(folder)) if path.exists()]
    if not paths:
        return  # what is missing is named where it is read
    if not sums.exists():
        log.warning("%s has no %s, so damage to it goes unnoticed; launch/export.py writes one", folder, sums.name)
        return
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines()
    for path in paths:
        if f"{sha256_of(path)}  {path.name}" not in lines:
            raise ExportError(
                f"{path} does not have its checksum of {sums.name}: copy or export it again; if you changed it "
                f"yourself, delete {sums}"
            )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except FileNotFoundError:
        needed = "launch/export.py writes it"
        if (path.parent / "scores.json").exists():
            needed = f"it is a finetuning run, so give its export {path.parent}/last"
        elif (path.parent / "config.yaml").exists():
            needed = f"it is a run, so export it first: launch/export.py --run {path.parent} --output HF_DIR"
        raise FileNotFoundError(f"no export at {path.parent}: {path} does not exist; {needed}") from None
    found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
    if found not in (MODEL_TYPE, MODERNBERT):
        raise ExportError(f"{path} is of model_type {found!r}, not {MODEL_TYPE!r}: give a folder of launch/export.py")
    return config


def _checked(type_: Any, config: dict[str, Any], folder: Path) -> Any:
    """What config.json says, as the type has it. ExportError names every field that does not fit."""
    try:
        return TypeAdapter(type_).validate_python(config)
    except ValidationError as error:
        raise ExportError(
            f"{folder / 'config.json'} describes no model of ours: {validation_problems(error)}"
        ) from error


def _head(config: dict[str, Any], folder: Path) -> Head:
    names = config.get("architectures")
    if names == ["GmlpScaleModel"]:  # as sentence-transformers saves it
        return "masked_language_model"  # whose output matrix is the embedding, so the weights are the same
    for head, name in CLASS_OF_HEAD.items():
        if names == [name]:
            return head
    known = ", ".join(CLASS_OF_HEAD.values())
    raise ExportError(f"{folder / 'config.json'} has architectures {names!r}; needed is one of {known}")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in _weight_files(folder):
        try:
            tensors |= load_file(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"no weights at {folder}: {path} does not exist") from None
        except SafetensorError as error:
            raise ExportError(f"{path} cannot be read ({error}): export or copy it again") from error
    return {name.removeprefix(PREFIX): tensor.float() for name, tensor in tensors.items()}


def _weight_files(folder: Path) -> list[Path]:
    """model.safetensors; or, if save_pretrained wrote several files, the ones that its index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / WEIGHTS_NAME).exists() or not index.exists():
        return [folder / WEIGHTS_NAME]
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{index} is not an index of weights ({error!r}): save or copy the model again") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise ExportError(f"{index} names files of another folder: {', '.join(outside)}")
    return [folder / name for name in names]
