"""SQuAD v1.1 and v2.0: rows `<cls> question <sep> window <sep>`, one for each window of a question's context.

Shape suffixes: B batch, N positions, R rows.
"""

import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gmlp_scale.data.shards import row_dtype
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.task_heads import SpanBatch, SpanPredictor
from gmlp_scale.tasks.records import DataError, DataSet, Record, read_records, require_columns, text_mistake
from gmlp_scale.tasks.scores import squad_v1_scores, squad_v2_scores
from gmlp_scale.tasks.windows import (
    SUMMARY_SIZE,
    Window,
    WindowScores,
    answer_tokens,
    best_answer,
    summarize,
    window_rows,
)

log = logging.getLogger(__name__)

NULL_THRESHOLD = 0.0
"""In v2.0, a question with null odds above this gets no answer."""
_COLUMNS = ("id", "question", "context", "answers")


@dataclass(frozen=True)
class Answer:
    text: str
    start: int | None
    """Index of its first character in the context; None if the context does not hold it."""


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """Empty if the question cannot be answered."""


def read_questions(source: str, part: str, data_set: DataSet, has_unanswerable: bool) -> list[Question]:
    """All questions of a source in its order.

    If an answer does not stand at its offset, it is placed where the context holds it nearest to the offset. If the
    context does not hold it, it has no place and counts for scoring only. A training question is left out if none of
    its answers has a place. Warnings count these cases.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: there are no questions, a column is missing, or records are wrong; it names them all.
    """
    questions, mistakes = [], []
    moved, lost = [], []
    num_left_out = 0
    for record in read_records(source, part, data_set):
        require_columns(source, record, [_COLUMNS])
        if of_record := _record_mistakes(record, has_unanswerable):
            mistakes += of_record
            continue
        fields = record.fields
        answers = fields["answers"]
        given = [Answer(*pair) for pair in zip(answers["text"], answers["answer_start"], strict=True)]
        placed = tuple(_placed(answer, fields["context"]) for answer in given)
        for before, after in zip(given, placed, strict=True):
            if after.start != before.start:
                (lost if after.start is None else moved).append(f"{record.place}: {before.text!r}")
        if part == "train" and placed and all(answer.start is None for answer in placed):
            num_left_out += 1
            continue
        questions.append(Question(fields["id"], fields["question"], fields["context"], placed))
    numbers = Counter(question.id for question in questions)
    mistakes += [
        f"id {id} stands there {number} times: give each question its own"
        for id, number in numbers.items()
        if number > 1
    ]
    if mistakes:
        raise DataError(source, mistakes)
    if not questions:
        raise DataError(source, ["holds no questions that can be used"])
    if moved:
        log.warning("%s: %d answers stand elsewhere than at their offset; first %s", source, len(moved), moved[0])
    if lost:
        log.warning(
            "%s: %d answers are not in their context, so %d questions were left out; first %s",
            source, len(lost), num_left_out, lost[0],
        )  # fmt: skip
    return questions


def _record_mistakes(record: Record, has_unanswerable: bool) -> list[str]:
    fields, mistakes = record.fields, []
    for column in ("id", "question", "context"):
        if mistake := text_mistake(record.place, column, fields[column]):
            mistakes.append(mistake)
        elif not fields[column].strip():
            mistakes.append(f"{record.place}: the {column} is empty")
    answers = fields["answers"] if isinstance(fields["answers"], dict) else {}
    texts, starts = answers.get("text"), answers.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        needed = "text and answer_start, a list each"
        return [*mistakes, f"{record.place}: answers is {fields['answers']!r}; needed: {needed}"]
    if len(texts) != len(starts):
        mistakes.append(f"{record.place}: {len(texts)} answers but {len(starts)} offsets")
    if wrong := [start for start in starts if not isinstance(start, int)]:
        mistakes.append(f"{record.place}: the offset {wrong[0]!r} is no whole number")
    mistakes += filter(None, (text_mistake(record.place, "an answer", text) for text in texts))
    if not texts and not has_unanswerable:
        mistakes.append(f"{record.place}: no answer; only task squad_v2 has such questions")
    return mistakes


def _placed(answer: Answer, context: str) -> Answer:
    """The answer at its offset, else where the context holds it nearest to that, else without a place."""
    if answer.text.strip() and answer.start >= 0 and context.startswith(answer.text, answer.start):
        return answer
    places = []
    start = context.find(answer.text) if answer.text.strip() else -1
    while start >= 0:
        places.append(start)
        start = context.find(answer.text, start + 1)
    return replace(answer, start=min(places, key=lambda place: abs(place - answer.start), default=None))


@dataclass(frozen=True)
class QuestionTask:
    name: str
    data_set: DataSet
    has_unanswerable: bool
    """v2.0: some questions have no answer, and the score rewards a model that says so."""
    official_sizes: Mapping[str, int]
    main_score = "f1"
    head_name = "question_answering"
    class_names = ()
    has_windows = True
    num_texts = 2

    def head(self, **backbone) -> SpanPredictor:
        return SpanPredictor(**backbone)

    def read(
        self, source: str, part: str, tokenizer: Tokenizer, sequence_length: int, document_stride: int
    ) -> "QuestionRows":
        questions = read_questions(source, part, self.data_set, self.has_unanswerable)
        return QuestionRows(questions, tokenizer, sequence_length, document_stride, self.has_unanswerable)

    def shown(self, score: str, value: float) -> str:
        """The scores are in percent already; counts of questions are integers."""
        return f"{value}" if isinstance(value, int) else f"{value:.2f}"


@dataclass(frozen=True)
class _Row:
    question_index: int
    window: Window
    context_position: int
    """Position in the row of the window's first token."""


class QuestionRows:
    """One part of SQuAD, its windows as rows for the model."""

    summary_size = SUMMARY_SIZE
    summarize = staticmethod(summarize)
    has_labels = True

    def __init__(
        self,
        questions: list[Question],
        tokenizer: Tokenizer,
        sequence_length: int,
        document_stride: int,
        has_unanswerable: bool,
    ):
        self.questions, self.has_unanswerable = questions, has_unanswerable
        self.num_examples = len(questions)
        self.rows: list[_Row] = []
        self.token_ranges: list[np.ndarray] = []
        """For each question, the characters of the context that each token holds, [T, 2]."""
        token_ids, answers, dtype = [], [], row_dtype(tokenizer.vocab_size)
        encode_context = functools.lru_cache(maxsize=8)(lambda context: _encode_context(tokenizer, context))
        encoded_questions = tokenizer.encode_batch([question.question.strip() for question in questions])
        for question_index, (question, question_ids) in enumerate(zip(questions, encoded_questions, strict=True)):
            context_ids, token_ranges = encode_context(question.context)
            self.token_ranges.append(token_ranges)
            placed = next((answer for answer in question.answers if answer.start is not None), None)
            answer = placed and answer_tokens(token_ranges, placed.start, placed.start + len(placed.text))
            position, of_question = window_rows(question_ids, context_ids, sequence_length, document_stride)
            for window, ids in of_question:
                token_ids.append(ids.astype(dtype))
                self.rows.append(_Row(question_index, window, position))
                is_inside = answer is not None and window.first <= answer[0] and answer[1] < window.stop
                answers.append([token - window.first + position for token in answer] if is_inside else [0, 0])
        self.num_rows = len(self.rows)
        self.token_ids_RN = np.stack(token_ids)
        self.answers_R2 = np.array(answers, np.int64)
        """Positions of the answer's first and last token; 0, the position of <cls>, if it is not in the window."""

    def batch(self, row_indices: np.ndarray) -> SpanBatch:
        token_ids_BN = torch.from_numpy(self.token_ids_RN[row_indices].astype(np.int64))
        first_positions_B, last_positions_B = torch.from_numpy(self.answers_R2[row_indices]).unbind(1)
        return SpanBatch(token_ids_BN, first_positions_B, last_positions_B)

    def answers(self, summaries: np.ndarray) -> tuple[dict[str, str], dict[str, float]]:
        """For each question id the text of its likeliest span, and the odds of no answer against it."""
        windows: list[list[WindowScores]] = [[] for _ in self.questions]
        for row, summary in zip(self.rows, summaries, strict=True):
            windows[row.question_index].append(WindowScores(row.window, row.context_position, summary))
        texts, null_odds = {}, {}
        for question, scores, token_ranges in zip(self.questions, windows, self.token_ranges, strict=True):
            start, stop, null_odds[question.id] = best_answer(scores, question.context, token_ranges)
            texts[question.id] = question.context[start:stop]
        return texts, null_odds

    def scores(self, summaries: np.ndarray) -> dict[str, float]:
        """What the official script prints, in percent; for v2.0 at NULL_THRESHOLD and at the best thresholds."""
        golds = {question.id: [answer.text for answer in question.answers] for question in self.questions}
        texts, null_odds = self.answers(summaries)
        if self.has_unanswerable:
            return squad_v2_scores(golds, texts, null_odds, NULL_THRESHOLD)
        return squad_v1_scores(golds, texts)

    def write_predictions(self, summaries: np.ndarray, folder: Path) -> None:
        """Writes predictions.json, in which "" means no answer; for v2.0 also null_odds.json and span_predictions.json.

        span_predictions.json holds the likeliest span even where no answer is likelier. Given it, null_odds.json and
        --na-prob-thresh 0, the official script prints the scores of this run with its best thresholds.
        """
        texts, null_odds = self.answers(summaries)
        files = {"predictions": texts}
        if self.has_unanswerable:
            answered = {id: "" if null_odds[id] > NULL_THRESHOLD else text for id, text in texts.items()}
            files = {"predictions": answered, "null_odds": null_odds, "span_predictions": texts}
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.token_ids_RN.tobytes() + self.answers_R2.tobytes()).hexdigest()


def _encode_context(tokenizer: Tokenizer, context: str) -> tuple[np.ndarray, np.ndarray]:
    """The context's token ids [T] and the characters [start, stop) that each token holds [T, 2]."""
    ids, ranges = tokenizer.encode_with_offsets(context)
    return np.array(ids), np.array(ranges)
