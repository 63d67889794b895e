"""What runs of one model on one task's data share: the export and the rows of every part."""

import functools
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from gmlp_scale.config import ConfigError
from gmlp_scale.export.folder import Export, read_export
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.tasks.table import TaskRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    export: Export
    rows: dict[str, TaskRows]
    """By part: train, and those of FinetuneConfig.parts."""

    @functools.cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """What a resumed run must find again."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.export.weights.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        scored = {part: rows.fingerprint for part, rows in self.rows.items() if not part.startswith("test")}
        return {
            "weights_sha256": digest.hexdigest(),
            "tokenizer_sha256": self.export.tokenizer.sha256,
            **{f"{part}_sha256": fingerprint for part, fingerprint in scored.items()},
        }


def read_inputs(run: FinetuneConfig) -> Inputs:
    """Reads the export and every part of the data that was given.

    Raises:
        FileNotFoundError, ExportError, DataError: naming the file and what is wrong with it.
        ConfigError: the model is too short for the rows.
    """
    export = read_export(run.model)
    if run.data.sequence_length > export.model.sequence_length:
        found = (
            f"found {run.data.sequence_length}; the model at {run.model} takes at most {export.model.sequence_length}"
        )
        raise ConfigError(run.name, [f"data.sequence_length: {found}"])
    rows = {
        part: run.task_row.read(
            run.data.source(part), part, export.tokenizer, run.data.sequence_length, run.data.document_stride
        )
        for part in ("train", *run.parts)
    }
    for part in run.parts:
        same_file = run.data.source(part) == run.data.train and Path(run.data.train).is_file()
        if same_file or rows[part].fingerprint == rows["train"].fingerprint:
            log.warning("data.%s holds the training data (%s): its score tells nothing", part, run.data.source(part))
    return Inputs(export, rows)
