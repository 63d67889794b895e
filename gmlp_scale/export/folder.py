"""Writes a model as a Hugging Face folder.

    model.safetensors      float32, our parameter names under "model."; the output matrix is the embedding, kept once
    config.json            the recipe's model section, the classes to load (auto_map) and where the weights came from
    modeling_gmlp.py, configuration_gmlp.py ...    code that needs torch and transformers, but not this package
    tokenizer.json, tokenizer_config.json          the tokenizer for transformers
    tokenizer.model        the same tokenizer for this package
    modules.json ...       what sentence-transformers reads: an embedding is the mean over a text's tokens
    README.md              the model card
    SHA256SUMS             the checksum of every other file, as `sha256sum -c SHA256SUMS` reads it

gmlp_scale/checkpoint/trained.py reads it back.
"""

import importlib.util
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gmlp_scale.checkpoint.format import difference
from gmlp_scale.checkpoint.modernbert import to_modernbert
from gmlp_scale.checkpoint.trained import (
    CHECKSUMS_NAME,
    CLASS_OF_HEAD,
    MODEL_TYPE,
    PREFIX,
    WEIGHTS_NAME,
    ExportError,
    TrainedModel,
    expected_shapes,
    sha256_of,
    shapes_of,
)
from gmlp_scale.data.batch import CLS_ID, MASK_ID, PAD_ID, SEP_ID
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.export.card import Publication, model_card
from gmlp_scale.export.fast_tokenizer import write_tokenizer
from gmlp_scale.export.sentence_files import write_sentence_files
from gmlp_scale.fields import Mark, marked_fields
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import is_url, read_file
from gmlp_scale.train.sinks import read_metrics

_LOCAL = Publication()
_TEXT, _IMAGES = "modeling_gmlp", "modeling_gmlp_images"
_CLASS_OF_IMAGES = "GmlpScaleForImageClassification"
_AUTO_CLASSES = {
    _TEXT: {"AutoModel": "GmlpScaleModel"}
    | {name.replace("GmlpScaleFor", "AutoModelFor"): name for name in CLASS_OF_HEAD.values()},
    _IMAGES: {"AutoModelForImageClassification": _CLASS_OF_IMAGES},
}
_SPECIAL = {"pad_token_id": PAD_ID, "cls_token_id": CLS_ID, "sep_token_id": SEP_ID, "mask_token_id": MASK_ID}
_OF_ONE_MACHINE = {field.rpartition(".")[2] for field in marked_fields(Mark.OF_ONE_MACHINE, RunConfig)}
_FOLDER = "gmlp_scale.export.hugging_face"
_IMPORT = re.compile(r"^from (gmlp_scale[\w.]*|pydantic) import", flags=re.MULTILINE)


def export_checkpoint(
    trained: TrainedModel, run_folder: str | Path, folder: Path, publication: Publication = _LOCAL
) -> None:
    """Writes a checkpoint that read_run or read_all_steps read from the run.

    The export's details are the step, the last held-out evaluation up to it, the data's fingerprint and the config.

    Raises:
        ExportError, TrainedModelError: `folder` is not empty, or the run's tokenizer is no longer beside its shards.
    """
    trained.tokenizer()  # raises if it has changed
    details = {"step": trained.step, "heldout": _heldout_result(run_folder, trained), **trained.details}
    write_export(replace(trained, details=details), folder, publication=publication)


def write_export(
    trained: TrainedModel, folder: Path, *, document_stride: int | None = None, publication: Publication = _LOCAL
) -> None:
    """Writes the folder whole or not at all.

    Args:
        trained: its details are kept in config.json and shown in the card, without the places on this machine.
        document_stride: for question answering, the tokens from one window to the next in finetuning.

    Raises:
        ExportError: the folder is not empty.
        FileNotFoundError: the model's tokenizer folder has no tokenizer.
    """
    trained = replace(trained, details=without_local_places(trained.details))
    tokenizer, model = Tokenizer(trained.tokenizer_folder), trained.config
    expected = expected_shapes(model, trained.head, len(trained.labels))
    found = shapes_of(trained.weights)
    assert found == expected, f"not the weights of this model and head: {difference(found, expected)}"
    config = transformers_config(trained, row_length=trained.row_length, **_SPECIAL)
    if document_stride:
        config["document_stride"] = document_stride
    with new_export(folder, config, trained.weights, model_card(trained, publication)) as unfinished:
        longest = trained.row_length or model.sequence_length
        write_tokenizer(unfinished, tokenizer, longest)
        write_sentence_files(unfinished, model.d_model, longest)
        (unfinished / MODEL_NAME).write_bytes(read_file(f"{trained.tokenizer_folder}/{MODEL_NAME}"))


def write_modernbert(trained: TrainedModel, folder: Path) -> None:
    """Writes a pretrained modern_transformer as a folder that transformers reads without code of ours.

    Raises InputError if `folder` is not empty, or the model is none that ModernBERT can be.
    """
    tokenizer = trained.tokenizer()
    config, tensors = to_modernbert(trained.config, trained.weights, tokenizer)
    config |= {"details": without_local_places(trained.details)}
    with _new_folder(folder, config, tensors) as unfinished:
        write_tokenizer(unfinished, tokenizer, trained.config.sequence_length)
        (unfinished / MODEL_NAME).write_bytes(read_file(f"{trained.tokenizer_folder}/{MODEL_NAME}"))


def transformers_config(trained: TrainedModel, **fields: Any) -> dict[str, Any]:
    """config.json: the model and its head, with `fields` beside the model's own, and where the weights came from."""
    head, labels = trained.head, trained.labels
    module = _IMAGES if head == "image_classification" else _TEXT
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [CLASS_OF_HEAD.get(head, _CLASS_OF_IMAGES)],
        "auto_map": {
            "AutoConfig": "configuration_gmlp.GmlpScaleConfig",
            **{auto: f"{module}.{name}" for auto, name in _AUTO_CLASSES[module].items()},
        },
        "dtype": "float32",
        **trained.config.model_dump(mode="json", exclude={"kernels"}),
        **fields,
    }
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
    if len(labels) == 1 and head == "sequence_classification":
        config["problem_type"] = "regression"  # else transformers' pipeline applies a sigmoid
    return config | {"details": trained.details}


def without_local_places(details: Any) -> Any:
    """A JSON-able value without the fields that are OfOneMachine, and with the last name alone of every other path.

    The places on the machine of the training mean nothing elsewhere, but a last name may: c4_512 of /data/c4_512 names
    the data. URLs stay.
    """
    match details:
        case str() if "/" in details and (not is_url(details) or details.startswith(("file:", "local:"))):
            return Path(details).name
        case dict():
            return {name: without_local_places(value) for name, value in details.items() if name not in _OF_ONE_MACHINE}
        case list() | tuple():
            return [without_local_places(value) for value in details]
        case _:
            return details


def json_text(content: dict[str, Any]) -> str:
    """`content` as JSON. A number that is not finite, such as the loss of a model with NaN weights, becomes null."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2, allow_nan=False) + "\n"


def check_is_free(folder: Path) -> None:
    """Raises ExportError unless `folder` is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"{folder} is there already: remove it, or name another folder")


@contextmanager
def new_export(
    folder: Path, config: dict[str, Any], weights: Mapping[str, Tensor], card: str, *, of_images: bool = False
) -> Iterator[Path]:
    """A new folder beside `folder` with config.json, weights, code and card; the block adds what else there is.

    The rest is as in _new_folder.
    """
    tensors = {PREFIX + name: tensor.contiguous() for name, tensor in weights.items()}
    with _new_folder(folder, config, tensors) as unfinished:
        copy_sources(unfinished, of_images=of_images)
        (unfinished / "README.md").write_text(card, encoding="utf-8")
        yield unfinished


@contextmanager
def _new_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[Path]:
    """A new folder beside `folder` with config.json and weights; the block adds what else there is.

    If the block succeeds, SHA256SUMS is added and the new folder gets the name of `folder`. If it fails, the new folder
    is removed. Raises ExportError unless `folder` is absent or empty.
    """
    check_is_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    unfinished.mkdir()
    try:
        save_file(tensors, unfinished / WEIGHTS_NAME, metadata={"format": "pt"})
        (unfinished / "config.json").write_text(json_text(config), encoding="utf-8")
        # safetensors lets only the file's owner read it.
        shutil.copymode(unfinished / "config.json", unfinished / WEIGHTS_NAME)
        yield unfinished
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        sums = [f"{sha256_of(path)}  {path.relative_to(unfinished)}\n" for path in files]
        (unfinished / CHECKSUMS_NAME).write_text("".join(sums), encoding="utf-8")
        unfinished.rename(folder)
    except BaseException as error:
        shutil.rmtree(unfinished)
        if isinstance(error, SafetensorError):  # as of a full disk
            raise OSError(f"{folder} cannot be written: {error}") from error
        if isinstance(error, OSError) and error.errno and not error.filename:  # as of a full disk too
            error.filename = str(folder)
        raise


def _heldout_result(run_folder: str | Path, trained: TrainedModel) -> dict[str, float] | None:
    """The last evaluation up to the step: its step, loss, perplexity and accuracy; None if there is none.

    An evaluation at the step itself also has num_rows. An earlier one may have taken another number of rows.
    """
    lines = read_metrics(f"{run_folder}/metrics.jsonl")
    evaluations = [line for line in lines if "eval/perplexity" in line and line["step"] <= trained.step]
    if not evaluations:
        return None
    heldout = {
        name.removeprefix("eval/"): math.nan if value is None else value for name, value in evaluations[-1].items()
    }
    if heldout["step"] == trained.step:
        heldout["num_rows"] = trained.num_evaluation_rows
    return heldout


def copy_sources(folder: Path, *, of_images: bool = False) -> None:
    """Writes the code for text or images, and every module that it imports, into `folder`."""
    modeling = _IMAGES if of_images else _TEXT
    waiting, source_of = [f"{_FOLDER}.{modeling}"], {}
    if not of_images:
        waiting.append(f"{_FOLDER}.answering_pipeline")
    while waiting:
        module = waiting.pop()
        if module not in source_of:
            origin = importlib.util.find_spec(_own(module)).origin
            source_of[module] = Path(origin).read_text(encoding="utf-8")
            waiting += _IMPORT.findall(source_of[module])
    names = {_flat_name(module) for module in source_of}
    assert len(names) == len(source_of), f"two modules of one name: {sorted(source_of)}"
    # From a local folder transformers 4 takes only the files that the modeling file imports directly.
    others = sorted(names - {modeling})
    source_of[f"{_FOLDER}.{modeling}"] += "\n" + "".join(
        f"from .{name} import __name__ as _  # noqa\n" for name in others
    )
    for module, source in source_of.items():
        flat = _IMPORT.sub(lambda found: f"from .{_flat_name(found[1])} import", source)
        (folder / f"{_flat_name(module)}.py").write_text(flat, encoding="utf-8")


def _own(module: str) -> str:
    return f"{_FOLDER}.plain_config" if module == "pydantic" else module


def _flat_name(module: str) -> str:
    return _own(module).rpartition(".")[2]
