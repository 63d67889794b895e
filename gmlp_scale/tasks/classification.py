"""Sequence classification, as in GLUE: rows `<cls> A <sep>` or `<cls> A <sep> B <sep>`.

Shape suffixes: B batch, N positions, C classes, R rows.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.data.shards import row_dtype
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.task_heads import LabelledBatch, SequenceClassifier, label_loss
from gmlp_scale.tasks.records import DataError, DataSet, read_records, require_columns, text_mistake
from gmlp_scale.tasks.scores import accuracy

log = logging.getLogger(__name__)

NO_CONSENSUS = "-"
"""MultiNLI's gold_label where the annotators did not agree. Such examples are left out everywhere."""
HIDDEN = (-1, "-1", None)
"""Labels of a test part whose labels are secret: -1 is what `datasets` gives, None what a file without them has."""


@dataclass(frozen=True)
class Example:
    number: str
    """GLUE's index, or the example's number in its file, from 0."""
    texts: tuple[str, ...]
    """One sentence or two."""
    label: int | float | None
    """None in a test part without labels."""


@dataclass(frozen=True)
class ClassificationTask:
    name: str
    data_set: DataSet
    text_columns: tuple[tuple[str, ...], ...]
    """The columns of the texts in GLUE's TSV, and in what `datasets` gives."""
    class_names: tuple[str, ...]
    label_columns: tuple[str, ...] = ("label",)
    """The names that the label's column may have."""
    labels: tuple[str, ...] = ("0", "1")
    """The classes' labels as GLUE's files write them, in the order of the numbers that `datasets` gives."""
    official_sizes: Mapping[str, int] = field(default_factory=dict)
    scores: tuple[Callable[[Sequence, Sequence], float], ...] = (accuracy,)
    """Functions of predictions and labels; a perfect score is 1. The first one is the main score."""
    label_dtype = np.int64
    head_name = "sequence_classification"
    has_windows = False

    @property
    def num_texts(self) -> int:
        """In an example."""
        return len(self.text_columns[0])

    @property
    def main_score(self) -> str:
        return self.scores[0].__name__

    def head(self, **backbone) -> SequenceClassifier:
        return SequenceClassifier(num_classes=len(self.class_names), **backbone)

    def read(
        self, source: str, part: str, tokenizer: Tokenizer, sequence_length: int, document_stride: None
    ) -> "ClassificationRows":
        assert document_stride is None
        return ClassificationRows(self, read_examples(self, source, part), part, tokenizer, sequence_length)

    def label(self, value: object) -> int | None:
        """The class that a file gives by its label or its number; None if there is no such class."""
        if isinstance(value, str):
            return self.labels.index(value) if value in self.labels else None
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and 0 <= value < len(self.labels) else None

    @property
    def possible_labels(self) -> str:
        """The labels as messages name them."""
        return ", ".join(self.labels)

    def predictions(self, logits_RC: np.ndarray) -> np.ndarray:
        """What the scores compare with each row's label."""
        return logits_RC.argmax(-1)

    def submission(self, part: str) -> str:
        """The name of the part's predictions file, as GLUE's server takes it."""
        matched = ("-mm" if part.endswith("_mismatched") else "-m") if "dev_mismatched" in self.data_set.parts else ""
        return f"{self.data_set.glue_folder or self.name}{matched}.tsv"

    def written(self, prediction: int) -> str:
        """A prediction as GLUE's server takes it."""
        return self.labels[prediction]

    def shown(self, score: str, value: float) -> str:
        """The loss as it is, any other score in percent."""
        return f"{value:.4f}" if score.startswith("loss") else f"{100 * value:.2f}"


@dataclass(frozen=True)
class RegressionTask(ClassificationTask):
    """A number instead of a class: the logit of its one class. The loss is the mean squared error."""

    labels: tuple[str, ...] = ()
    scale: tuple[float, float] = (0.0, 5.0)
    """The least label and the greatest."""
    label_dtype = np.float32

    def label(self, value: object) -> float | None:
        """The number that a file gives; None if it is none, or outside the scale."""
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if self.scale[0] <= number <= self.scale[1] else None

    @property
    def possible_labels(self) -> str:
        return f"{self.scale[0]:g} to {self.scale[1]:g}"

    def predictions(self, logits_RC: np.ndarray) -> np.ndarray:
        return logits_RC[:, 0]

    def written(self, prediction: float) -> str:
        return f"{prediction:.3f}"


def read_examples(task: ClassificationTask, source: str, part: str) -> list[Example]:
    """All examples of a source in its order, except those without consensus. A test part may have no labels.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: there are no examples, a column is missing, or texts or labels are wrong; it names them all.
    """
    examples, mistakes, num_left_out = [], [], 0
    text_columns: tuple[str, ...] = ()
    label_column = None
    for number, record in enumerate(read_records(source, part, task.data_set)):
        if not text_columns:
            text_columns = require_columns(source, record, task.text_columns)
        if label_column is None and not (
            part.startswith("test") and record.fields.keys().isdisjoint(task.label_columns)
        ):
            (label_column,) = require_columns(source, record, [(column,) for column in task.label_columns])
        written = record.fields.get(label_column)
        if written == NO_CONSENSUS:
            num_left_out += 1
            continue
        texts = tuple(record.fields.get(column) for column in text_columns)
        for column, text in zip(text_columns, texts, strict=True):
            if mistake := text_mistake(record.place, column, text):
                mistakes.append(mistake)
        label = task.label(written)
        is_hidden = part.startswith("test") and written in HIDDEN
        if label is None and not is_hidden:
            mistakes.append(f"{record.place}: {label_column} is {written!r}; {task.name} has {task.possible_labels}")
        index = record.fields.get("index", record.fields.get("idx", number))
        examples.append(Example(str(index), texts, label))
    num_hidden = sum(example.label is None for example in examples)
    if not mistakes and 0 < num_hidden < len(examples):
        mistakes.append(f"{num_hidden} of {len(examples)} labels are missing or -1; give all labels, or none")
    if mistakes:
        raise DataError(source, mistakes)
    if not examples:
        raise DataError(source, ["holds no examples"])
    if num_left_out:
        log.warning("%s: %d examples without consensus (%s) were left out", source, num_left_out, NO_CONSENSUS)
    return examples


class ClassificationRows:
    """One part of a classification task, as rows for the model."""

    def __init__(
        self, task: ClassificationTask, examples: list[Example], part: str, tokenizer: Tokenizer, sequence_length: int
    ):
        self.task, self.examples, self.part = task, examples, part
        self.num_examples = self.num_rows = len(examples)
        self.has_labels = examples[0].label is not None
        self.summary_size = len(task.class_names)
        self.token_ids_RN = np.full((len(examples), sequence_length), PAD_ID, row_dtype(tokenizer.vocab_size))
        labels = [example.label for example in examples] if self.has_labels else [HIDDEN[0]] * len(examples)
        self.labels_R = np.array(labels, task.label_dtype)
        columns = zip(*(example.texts for example in examples), strict=True)
        encoded = [tokenizer.encode_batch([text.strip() for text in column]) for column in columns]
        num_truncated = 0
        for row_index, texts in enumerate(zip(*encoded, strict=True)):
            kept = truncated([len(ids) for ids in texts], sequence_length - 1 - len(texts))
            num_truncated += kept != [len(ids) for ids in texts]
            pieces = [np.append(ids[:length], SEP_ID) for ids, length in zip(texts, kept, strict=True)]
            ids = np.concatenate([[CLS_ID], *pieces])
            self.token_ids_RN[row_index, : len(ids)] = ids
        if num_truncated:
            log.info("%s: %d of %d rows were cut to %d tokens", part, num_truncated, self.num_rows, sequence_length)

    def batch(self, row_indices: np.ndarray) -> LabelledBatch:
        token_ids_BN = torch.from_numpy(self.token_ids_RN[row_indices].astype(np.int64))
        return LabelledBatch(token_ids_BN, torch.from_numpy(self.labels_R[row_indices]))

    def summarize(self, logits_BC: Tensor) -> Tensor:
        """All of the logits: scoring needs them."""
        return logits_BC

    def scores(self, logits_RC: np.ndarray) -> dict[str, float]:
        """The task's scores, and `label_loss` as `loss`."""
        predictions_R = self.task.predictions(logits_RC)
        scores = {score.__name__: score(predictions_R, self.labels_R) for score in self.task.scores}
        return scores | {"loss": label_loss(torch.from_numpy(logits_RC), torch.from_numpy(self.labels_R)).item()}

    def write_predictions(self, logits_RC: np.ndarray, folder: Path) -> None:
        """Writes the file that GLUE's server takes."""
        lines = ["index\tprediction"]
        for example, prediction in zip(self.examples, self.task.predictions(logits_RC).tolist(), strict=True):
            lines.append(f"{example.number}\t{self.task.written(prediction)}")
        path = folder / self.task.submission(self.part)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.token_ids_RN.tobytes() + self.labels_R.tobytes()).hexdigest()


def truncated(lengths: list[int], num_available: int) -> list[int]:
    """How many tokens of each text stay: while they do not fit, the longest text (the last of equals) loses one."""
    lengths = list(lengths)
    while sum(lengths) > num_available:
        longest = max(range(len(lengths)), key=lambda index: (lengths[index], index))
        lengths[longest] -= 1
    return lengths
