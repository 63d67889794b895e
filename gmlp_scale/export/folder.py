"""The Hugging Face folder of a model.

    model.safetensors      float32, our parameter names under "model."; the output matrix is the embedding, kept once
    config.json            the recipe's model section, the classes to load (auto_map) and where the weights came from
    modeling_gmlp.py, configuration_gmlp.py ...    code that needs torch and transformers, and not this package
    tokenizer.json, tokenizer_config.json          the tokenizer for transformers
    tokenizer.model        the same one for this package
    README.md              the model card

Read and written with safetensors and JSON alone: nothing in a folder that came from elsewhere is run or unpickled.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, MASK_ID, PAD_ID, SEP_ID
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.export.card import model_card
from gmlp_scale.export.carried_code import copy_sources
from gmlp_scale.export.tokenizer import write_tokenizer
from gmlp_scale.files import read_file
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.heads import MaskedLanguageModel, SequenceClassifier, SpanPredictor

Head = Literal["masked_language_model", "sequence_classification", "question_answering"]

MODEL_TYPE = "gmlp_scale"
PREFIX = "model."
WEIGHTS_NAME = "model.safetensors"
CLASS_OF_HEAD: dict[Head, str] = {
    "masked_language_model": "GmlpScaleForMaskedLM",
    "sequence_classification": "GmlpScaleForSequenceClassification",
    "question_answering": "GmlpScaleForQuestionAnswering",
}


class ExportError(ValueError):
    """A folder that is no export, or that none can be written to."""


@dataclass(frozen=True)
class Export:
    folder: Path
    model: ModelConfig
    weights: dict[str, Tensor]
    """Float32 on the CPU by our parameter names, those of build_model(model, head=head_class(head, len(labels)))."""
    tokenizer: Tokenizer
    head: Head
    labels: tuple[str, ...]
    """Names of the classes of a sequence classification head, in the order of its logits; else empty."""
    row_length: int | None
    """What rows are padded to, as they were in finetuning; None for a pretrained model."""
    details: dict[str, Any]
    """Where the weights came from, as given to write_export."""


def write_export(
    folder: Path,
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    tokenizer_folder: str | Path,
    details: dict[str, Any],
    head: Head = "masked_language_model",
    labels: Sequence[str] = (),
    row_length: int | None = None,
    document_stride: int | None = None,
) -> None:
    """Writes the folder whole or not at all.

    Args:
        weights: float32 by our parameter names, those of build_model(model, head=head_class(head, len(labels))).
        details: JSON-able; kept in config.json and shown in the card.
        row_length: what every row was padded to in finetuning.
        document_stride: of question answering: tokens from one window to the next in finetuning.
        tokenizer_folder: a path or a URL.

    Raises:
        ExportError: if the folder is there and not empty.
        FileNotFoundError: if there is no tokenizer in tokenizer_folder.
    """
    tokenizer = Tokenizer(tokenizer_folder)
    expected = _expected_shapes(model, head, len(labels))
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert found == expected, f"not the weights of this model and head: {_difference(found, expected)}"
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [CLASS_OF_HEAD[head]],
        "auto_map": {
            "AutoConfig": "configuration_gmlp.GmlpScaleConfig",
            "AutoModel": "modeling_gmlp.GmlpScaleModel",
            "AutoModelForMaskedLM": "modeling_gmlp.GmlpScaleForMaskedLM",
            "AutoModelForSequenceClassification": "modeling_gmlp.GmlpScaleForSequenceClassification",
            "AutoModelForQuestionAnswering": "modeling_gmlp.GmlpScaleForQuestionAnswering",
        },
        "dtype": "float32",
        **model.model_dump(mode="json", exclude={"kernels"}),
        "row_length": row_length,
        "pad_token_id": PAD_ID,
        "cls_token_id": CLS_ID,
        "sep_token_id": SEP_ID,
        "mask_token_id": MASK_ID,
        "details": details,
    }
    if document_stride:
        config["document_stride"] = document_stride
    if head == "question_answering":
        config["custom_pipelines"] = {
            "question-answering": {
                "impl": "answering_pipeline.QuestionAnsweringPipeline",
                "pt": ["AutoModelForQuestionAnswering"],
            }
        }
    if labels:
        config["id2label"] = dict(enumerate(labels))
        config["label2id"] = {label: number for number, label in enumerate(labels)}
    with _new_folder(folder) as unfinished:
        tensors = {PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, unfinished / WEIGHTS_NAME, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_sources(unfinished)
        write_tokenizer(unfinished, tokenizer, model.sequence_length)
        (unfinished / MODEL_NAME).write_bytes(read_file(f"{tokenizer_folder}/{MODEL_NAME}"))
        num_parameters = sum(tensor.numel() for tensor in weights.values())
        card = model_card(model, num_parameters, head, row_length, details)
        (unfinished / "README.md").write_text(card, encoding="utf-8")


def read_export(folder: str | Path) -> Export:
    """What write_export wrote, or transformers' save_pretrained with the tokenizer.model copied beside it.

    Raises:
        FileNotFoundError, ExportError: naming the file and what is wrong with it.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.json")
    model = _model_config(config, folder)
    head = _head(config, folder)
    labels = tuple(config["id2label"].values()) if head == "sequence_classification" else ()
    tokenizer = Tokenizer(folder)
    if tokenizer.vocab_size != model.vocab_size:
        raise ExportError(
            f"{folder}: {MODEL_NAME} has {tokenizer.vocab_size} pieces but config.json says vocab_size "
            f"{model.vocab_size}: they are not of one export"
        )
    weights = _read_weights(folder)
    expected = _expected_shapes(model, head, len(labels))
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if found != expected:
        raise ExportError(f"{folder}: the weights are not of config.json's model: {_difference(found, expected)}")
    details = config.get("details", {})
    return Export(folder, model, weights, tokenizer, head, labels, config.get("row_length"), details)


def head_class(head: Head, num_classes: int) -> Callable[..., Backbone]:
    """What build_model takes as its head; num_classes is for sequence classification."""
    match head:
        case "masked_language_model":
            return MaskedLanguageModel
        case "sequence_classification":
            return partial(SequenceClassifier, num_classes=num_classes)
        case "question_answering":
            return SpanPredictor


def check_is_free(folder: Path) -> None:
    """Raises ExportError unless `folder` is absent or empty."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ExportError(f"{folder} is there already: remove it, or name another folder")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A sibling that takes the folder's place when the block ends well, and is removed when it does not."""
    folder = Path(folder)
    check_is_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no export at {path.parent}: {path} does not exist; launch/export.py writes it"
        ) from None
    except ValueError as error:
        raise ExportError(f"{path} is not JSON ({error}): export the model again") from error
    found = config.get("model_type") if isinstance(config, dict) else type(config).__name__
    if found != MODEL_TYPE:
        raise ExportError(f"{path} is of model_type {found!r}, not {MODEL_TYPE!r}: give a folder of launch/export.py")
    return config


def _model_config(config: dict[str, Any], folder: Path) -> ModelConfig:
    kinds = get_args(get_args(ModelConfig)[0])
    names = {name for kind in kinds for name in kind.model_fields}
    try:
        return TypeAdapter(ModelConfig).validate_python({name: config[name] for name in names if name in config})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}" for mistake in error.errors())
        raise ExportError(f"{folder / 'config.json'} describes no model of ours: {problems}") from error


def _head(config: dict[str, Any], folder: Path) -> Head:
    names = config.get("architectures")
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
    """model.safetensors, or the files that the index of a save_pretrained in several files names."""
    index = folder / "model.safetensors.index.json"
    if (folder / WEIGHTS_NAME).exists() or not index.exists():
        return [folder / WEIGHTS_NAME]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{index} is not an index of weights ({error!r}): save or copy the model again") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise ExportError(f"{index} names files of another folder: {', '.join(outside)}")
    return [folder / name for name in names]


def _expected_shapes(model: ModelConfig, head: Head, num_classes: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        parameters = build_model(model, head=head_class(head, num_classes)).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def _difference(found: dict[str, tuple], expected: dict[str, tuple]) -> str:
    """The first few parameters that are missing, unknown or of another shape."""
    lines = [
        f"{name} is {found.get(name, 'missing')} and should be {expected.get(name, 'absent')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
