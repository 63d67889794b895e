"""Tagging of words, as in named entity recognition: CoNLL files, and rows `<cls> part of a sentence <sep>`.

A sentence is read as its words with a space between them. The first token of a word has the word's tag, as in BERT. A
sentence that is too long for a row is cut into overlapping windows, and a word counts in the one where its context is
maximal, as in SQuAD (windows.py).

Shape suffixes: B batch, N positions, C classes, R rows, W words of all sentences.
"""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, IGNORED, PAD_ID, SEP_ID
from gmlp_scale.data.shards import row_dtype
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.task_heads import TaggedBatch, TokenTagger
from gmlp_scale.tasks.records import DataError, DataSet, lines_of
from gmlp_scale.tasks.scores import entity_scores
from gmlp_scale.tasks.windows import cut_windows

Sentence = list[list[str]]
"""The columns of each of its lines: the word first and its tag last, or the word alone in a test part without tags."""


def read_conll(source: str, part: str, tags: tuple[str, ...]) -> list[Sentence]:
    """The sentences of a CoNLL file: a line for each word, an empty line after each sentence. -DOCSTART- is left out.

    Columns stand apart by spaces or tabs. Tags are BIO: B-TYPE begins an entity, I-TYPE goes on with it.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: there are no words, or lines are wrong; it names them all.
    """
    if not Path(source).is_file():
        raise FileNotFoundError(f"data.{part}: {source} is no file; give a CoNLL file, a word and its tag in a line")
    sentences, mistakes, num_columns, last_number, last_tag = [], [], 0, -1, "O"
    for number, line in lines_of(Path(source)):
        columns = re.split("[ \t]+", line.strip(" \t"))
        if not columns[0] or columns[0] == "-DOCSTART-":
            continue
        if number != last_number + 1:
            sentences.append([])
            last_tag = "O"
        num_columns, last_number = num_columns or len(columns), number
        sentences[-1].append(columns)
        tag, kind = columns[-1], columns[-1].partition("-")[2]
        if len(columns) != num_columns or (num_columns == 1 and not part.startswith("test")):
            needed = f"{num_columns}, as in the first line" if num_columns > 1 else "two or more: a word and its tag"
            mistakes.append(f"line {number}: found {len(columns)} columns; needed: {needed}")
        elif num_columns > 1 and tag not in tags:
            mistakes.append(f"line {number}: the tag is {tag!r}; data.entity_types gives {', '.join(tags)}")
        elif num_columns > 1 and tag.startswith("I-") and kind != last_tag.partition("-")[2]:
            mistakes.append(f"line {number}: {tag} follows {last_tag}; needed: an entity begins with B-{kind} (BIO)")
        last_tag = tag
    if mistakes:
        raise DataError(source, mistakes)
    if not sentences:
        raise DataError(source, ["holds no words"])
    return sentences


@dataclass(frozen=True)
class TaggingTask:
    name: str
    data_set: DataSet
    entity_types: tuple[str, ...] = ()
    """Of the recipe: data.entity_types."""
    main_score = "f1"
    head_name = "token_classification"
    has_windows = True
    num_texts = 1
    official_sizes = {}  # noqa: RUF012 - the paper has no scores of it

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("O", *(f"{place}-{kind}" for kind in self.entity_types for place in "BI"))

    def head(self, **backbone) -> TokenTagger:
        return TokenTagger(num_classes=len(self.class_names), **backbone)

    def read(
        self, source: str, part: str, tokenizer: Tokenizer, sequence_length: int, document_stride: int
    ) -> "TaggedRows":
        return TaggedRows(self, read_conll(source, part, self.class_names), tokenizer, sequence_length, document_stride)

    def shown(self, score: str, value: float) -> str:
        """In percent."""
        return f"{100 * value:.2f}"


class TaggedRows:
    """One part of a tagging task, as rows for the model."""

    def __init__(self, task: TaggingTask, sentences: list[Sentence], tokenizer: Tokenizer, length: int, stride: int):
        self.class_names, self.sentences = task.class_names, sentences
        self.num_examples, self.summary_size = len(sentences), length
        self.has_labels = len(sentences[0][0]) > 1
        rows, places = [], []
        for sentence in sentences:
            words = [columns[0] for columns in sentence]
            ids, ranges = tokenizer.encode_with_offsets(" ".join(words))
            starts = np.cumsum([0, *(len(word) + 1 for word in words[:-1])])
            first_tokens = np.searchsorted(np.array(ranges)[:, 1], starts, side="right")
            for window in cut_windows(len(ids), length - 2, stride):
                row = [CLS_ID, *ids[window.first : window.stop], SEP_ID]
                here = (window.first_maximal <= first_tokens) & (first_tokens < window.stop_maximal)
                places += [(len(rows), token - window.first + 1) for token in first_tokens[here]]
                rows.append(row + [PAD_ID] * (length - len(row)))
        self.num_rows, self.token_ids_RN = len(rows), np.array(rows, row_dtype(tokenizer.vocab_size))
        self.rows_W, self.positions_W = np.array(places).T
        """Where the first token of each word is that counts."""
        self.labels_RN = np.full(self.token_ids_RN.shape, IGNORED, np.int64)
        if self.has_labels:
            tags = [self.class_names.index(columns[-1]) for sentence in sentences for columns in sentence]
            self.labels_RN[self.rows_W, self.positions_W] = tags

    def batch(self, row_indices: np.ndarray) -> TaggedBatch:
        token_ids_BN = torch.from_numpy(self.token_ids_RN[row_indices].astype(np.int64))
        return TaggedBatch(token_ids_BN, torch.from_numpy(self.labels_RN[row_indices]))

    def summarize(self, logits_BNC: Tensor) -> Tensor:
        """The likeliest class at each position, and 0 where padding was cut off."""
        classes_BN = logits_BNC.argmax(-1).float()
        return F.pad(classes_BN, (0, self.summary_size - classes_BN.shape[1]))

    def predictions(self, classes_RN: np.ndarray) -> list[list[str]]:
        """The tags of each sentence's words."""
        tags = iter(classes_RN[self.rows_W, self.positions_W].astype(int).tolist())
        return [[self.class_names[next(tags)] for _ in sentence] for sentence in self.sentences]

    def scores(self, classes_RN: np.ndarray) -> dict[str, float]:
        golds = [[columns[-1] for columns in sentence] for sentence in self.sentences]
        return entity_scores(golds, self.predictions(classes_RN))

    def write_predictions(self, classes_RN: np.ndarray, folder: Path) -> None:
        """Writes predictions.conll: the file's columns, with the predicted tags in the last one."""
        with (folder / "predictions.conll").open("w", encoding="utf-8") as file:
            for sentence, tags in zip(self.sentences, self.predictions(classes_RN), strict=True):
                for columns, tag in zip(sentence, tags, strict=True):
                    file.write(" ".join([*(columns[:-1] if self.has_labels else columns), tag]) + "\n")
                file.write("\n")

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.token_ids_RN.tobytes() + self.labels_RN.tobytes()).hexdigest()
