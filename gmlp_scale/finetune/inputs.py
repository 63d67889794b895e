"""What all runs of one model on one task's data share: the pretrained model and the rows of every part."""

import functools
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from gmlp_scale.checkpoint.trained import TrainedModel, read_export
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.tasks.table import TaskRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    pretrained: TrainedModel
    rows: dict[str, TaskRows]
    """The rows of train and of each of FinetuneConfig.parts."""

    @functools.cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """SHA-256 of the weights, the tokenizer and the rows to learn from, which a resumed run must find again."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.pretrained.weights.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        learned = {part: rows.fingerprint for part, rows in self.rows.items() if not part.startswith("test")}
        return {
            "weights_sha256": digest.hexdigest(),
            "tokenizer_sha256": self.pretrained.tokenizer_sha256,
            **{f"{part}_sha256": fingerprint for part, fingerprint in learned.items()},
        }

    @functools.cached_property
    def tests_fingerprint(self) -> dict[str, str]:
        """SHA-256 of the test parts. They may be added to a finished run or changed: it then predicts them anew."""
        return {part: rows.fingerprint for part, rows in self.rows.items() if part.startswith("test")}


def read_inputs(run: FinetuneConfig) -> Inputs:
    """Reads the export and every part of the data that the recipe gives.

    Raises:
        FileNotFoundError, ExportError, DataError: naming the file and what is wrong with it.
        ConfigError: the rows are longer than the model allows.
    """
    pretrained = read_export(run.model)
    longest = pretrained.config.sequence_length
    if run.data.sequence_length > longest:
        found = f"found {run.data.sequence_length}; the model at {run.model} takes at most {longest}"
        raise ConfigError(run.name, [f"data.sequence_length: {found}"])
    tokenizer = pretrained.tokenizer()
    rows = {
        part: run.task_row.read(
            run.data.source(part), part, tokenizer, run.data.sequence_length, run.data.document_stride
        )
        for part in ("train", *run.parts)
    }
    for part in run.parts:
        same_file = run.data.source(part) == run.data.train and Path(run.data.train).is_file()
        if same_file or rows[part].fingerprint == rows["train"].fingerprint:
            log.warning("data.%s holds the training data (%s): its score says nothing", part, run.data.source(part))
        if not rows[part].has_labels:
            log.info("data.%s has no labels: its predictions are written, but not scored", part)
    return Inputs(pretrained, rows)
