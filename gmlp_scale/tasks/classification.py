"""Sequence classification: GLUE's MNLI and SST-2 as rows `<cls> A <sep>` or `<cls> A <sep> B <sep>`.

Shape suffixes: B batch, N positions, C classes.
"""

import functools
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.heads import LabelledBatch, SequenceClassifier
from gmlp_scale.tasks.records import DataError, Hub, read_records, require_columns, text_mistake
from gmlp_scale.tasks.scores import accuracy

log = logging.getLogger(__name__)

NO_CONSENSUS = "-"
"""MultiNLI's gold_label where the annotators did not agree; such examples count nowhere."""


@dataclass(frozen=True)
class Example:
    number: str
    """GLUE's index, or the place among the rows from 0."""
    texts: tuple[str, ...]
    """One sentence or two."""
    label: int | None
    """None in a test set."""


@dataclass(frozen=True)
class ClassificationTask:
    name: str
    hub: Hub
    text_columns: tuple[tuple[str, ...], ...]
    """In GLUE's TSV, and in what `datasets` gives."""
    label_columns: tuple[str, ...]
    labels: tuple[str, ...]
    """As GLUE's files write them, in the order of the numbers that `datasets` gives."""
    class_names: tuple[str, ...]
    submissions: Mapping[str, str]
    """GLUE's name of the predictions file of each part."""
    official_sizes: Mapping[str, int]
    main_score: str = "accuracy"

    @property
    def parts(self) -> tuple[str, ...]:
        """Of the data, besides train."""
        return tuple(self.submissions)

    def head(self, **backbone) -> SequenceClassifier:
        return SequenceClassifier(num_classes=len(self.labels), **backbone)

    def read(
        self, source: str, part: str, tokenizer: Tokenizer, sequence_length: int, document_stride: None
    ) -> "ClassificationRows":
        """Rows of one part. FileNotFoundError or DataError where it cannot be used."""
        assert document_stride is None
        return ClassificationRows(self, read_examples(self, source, part), part, tokenizer, sequence_length)


def read_examples(task: ClassificationTask, source: str, part: str) -> list[Example]:
    """Every example of a source in its order, but those without consensus; a test part needs no label column.

    Raises:
        DataError: no rows, a missing column, or every text and label that cannot be used, with its line.
    """
    is_test = part.startswith("test")
    examples, mistakes, num_left_out = [], [], 0
    text_columns: tuple[str, ...] = ()
    for number, record in enumerate(read_records(source, part, task.hub)):
        if not text_columns:
            text_columns = require_columns(source, record, list(task.text_columns))
            label_columns = [(column,) for column in task.label_columns]
            label_column = None if is_test else require_columns(source, record, label_columns)[0]
        if label_column and record.fields.get(label_column) == NO_CONSENSUS:
            num_left_out += 1
            continue
        texts = tuple(record.fields.get(column) for column in text_columns)
        for column, text in zip(text_columns, texts, strict=True):
            if mistake := text_mistake(record.place, column, text):
                mistakes.append(mistake)
        label = _label_number(task, record.fields.get(label_column)) if label_column else None
        if label_column and label is None:
            mistakes.append(
                f"{record.place}: {label_column} is {record.fields.get(label_column)!r}; {task.name} has "
                f"{', '.join(task.labels)}"
            )
        index = record.fields.get("index", record.fields.get("idx", number))
        examples.append(Example(str(index), texts, label))
    if mistakes:
        raise DataError(source, mistakes)
    if not examples:
        raise DataError(source, ["holds no rows"])
    if num_left_out:
        log.warning("%s: %d rows without consensus (%s) were left out", source, num_left_out, NO_CONSENSUS)
    return examples


def _label_number(task: ClassificationTask, value: object) -> int | None:
    if isinstance(value, str):
        return task.labels.index(value) if value in task.labels else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < len(task.labels) else None


class ClassificationRows:
    """A part of a classification task: its rows for the model, and what becomes of the logits."""

    def __init__(
        self, task: ClassificationTask, examples: list[Example], part: str, tokenizer: Tokenizer, sequence_length: int
    ):
        self.task, self.examples, self.part = task, examples, part
        self.num_examples = self.num_rows = len(examples)
        self.summary_size = len(task.labels)
        self.token_ids_RN = np.full((len(examples), sequence_length), PAD_ID, np.uint16)
        # A test row's label is never looked at.
        self.labels_R = np.array([example.label or 0 for example in examples], np.int64)
        encoded = [tokenizer.encode_batch([text.strip() for text in texts]) for texts in _columns(examples)]
        num_truncated = 0
        for row, texts in enumerate(zip(*encoded, strict=True)):
            kept = truncated([len(ids) for ids in texts], sequence_length - 1 - len(texts))
            num_truncated += kept != [len(ids) for ids in texts]
            pieces = [np.append(ids[:length], SEP_ID) for ids, length in zip(texts, kept, strict=True)]
            ids = np.concatenate([[CLS_ID], *pieces])
            self.token_ids_RN[row, : len(ids)] = ids
        if num_truncated:
            log.info("%s: %d of %d rows were cut to %d tokens", part, num_truncated, self.num_rows, sequence_length)

    def batch(self, rows: np.ndarray) -> LabelledBatch:
        token_ids_BN = torch.from_numpy(self.token_ids_RN[rows].astype(np.int64))
        return LabelledBatch(token_ids_BN, torch.from_numpy(self.labels_R[rows]))

    def summarize(self, logits_BC: Tensor) -> Tensor:
        """What scoring needs of the logits [B, summary_size]: all of them."""
        return logits_BC

    def scores(self, logits_RC: np.ndarray) -> dict[str, float]:
        """Accuracy, 0 to 1, and the mean cross-entropy in nats."""
        log_probabilities_RC = torch.from_numpy(logits_RC).log_softmax(-1).numpy()
        loss = -log_probabilities_RC[np.arange(self.num_rows), self.labels_R].mean()
        return {"accuracy": accuracy(logits_RC.argmax(-1), self.labels_R), "loss": float(loss)}

    def write_predictions(self, logits_RC: np.ndarray, folder: Path) -> None:
        """The file that GLUE's server takes, with the labels as GLUE writes them."""
        lines = ["index\tprediction"]
        for example, label in zip(self.examples, logits_RC.argmax(-1).tolist(), strict=True):
            lines.append(f"{example.number}\t{self.task.labels[label]}")
        path = folder / self.task.submissions[self.part]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.token_ids_RN.tobytes() + self.labels_R.tobytes()).hexdigest()


def truncated(lengths: list[int], num_available: int) -> list[int]:
    """How many tokens of each text stay: the longest loses its last, again and again (a tie: the last of them)."""
    lengths = list(lengths)
    while sum(lengths) > num_available:
        longest = max(range(len(lengths)), key=lambda index: (lengths[index], index))
        lengths[longest] -= 1
    return lengths


def _columns(examples: list[Example]) -> list[list[str]]:
    return [list(texts) for texts in zip(*(example.texts for example in examples), strict=True)]
