"""A trained model, be it a run's checkpoint or an export."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from gmlp_scale.config import RunConfig
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.export.folder import Export, head_class, read_export
from gmlp_scale.models import build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.run import load_pretrained
from gmlp_scale.train.checkpoint import CheckpointError, step_folders

log = logging.getLogger(__name__)


class AnalysisError(ValueError):
    """A model or run that cannot give what was asked for; the message says why."""


@dataclass(frozen=True)
class TrainedModel:
    place: Path
    """The checkpoint's or the export's folder."""
    step: int | None
    """Of pretraining; None where an export does not say."""
    model: Backbone
    """Float32, on the CPU, in evaluation mode."""
    recipe: RunConfig | None
    """Of the pretraining run; None for an export that holds none, such as a finetuned one."""
    tokenizer_folder: str
    tokenizer_sha256: str
    row_length: int | None
    """What rows are padded to, as they were in finetuning; None for a pretrained model."""

    def tokenizer(self) -> Tokenizer:
        """Raises AnalysisError where another one lies in its place."""
        tokenizer = Tokenizer(self.tokenizer_folder)
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise AnalysisError(
                f"{self.tokenizer_folder} is not the tokenizer that {self.place} was trained with: put it back"
            )
        return tokenizer


def read_run(run_dir: Path, step: int | None = None) -> TrainedModel:
    """A run's newest good checkpoint, or the one after `step`. Raises one of pretrain.USER_ERRORS."""
    recipe, checkpoint, model = load_pretrained(run_dir, step)
    tokenizer_sha256 = checkpoint.details["data"]["tokenizer_sha256"]
    tokenizer_folder = f"{recipe.data.shards}/tokenizer"
    return TrainedModel(checkpoint.path, checkpoint.step, model, recipe, tokenizer_folder, tokenizer_sha256, None)


def read_all_steps(run_dir: Path) -> Iterator[TrainedModel]:
    """Every complete checkpoint of a run, by its step; damaged ones are named and passed over.

    Raises:
        CheckpointError: there is no complete one.
    """
    num_complete = 0
    for folder in step_folders(run_dir / "checkpoints"):
        try:
            trained = read_run(run_dir, int(folder.name.removeprefix("step_")))
        except CheckpointError as error:
            log.warning("checkpoint passed over: %s", error)
            continue
        num_complete += 1
        yield trained
    if not num_complete:
        raise CheckpointError(f"{run_dir} holds no complete checkpoint: train the run first")


def read_model(export_dir: Path) -> TrainedModel:
    """An export, with whatever head. FileNotFoundError or ExportError where it cannot be read."""
    export = read_export(export_dir)
    model = build_model(export.model, head=head_class(export.head, len(export.labels)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(export.weights[name])
    return TrainedModel(
        export_dir,
        export.details.get("step"),
        model.eval(),
        _recipe(export),
        str(export_dir),
        export.tokenizer.sha256,
        export.row_length,
    )


def _recipe(export: Export) -> RunConfig | None:
    try:
        return RunConfig.model_validate(export.details.get("config"))
    except ValidationError:
        return None
