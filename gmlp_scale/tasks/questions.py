"""SQuAD's questions, read and checked, with the place of every answer in its context."""

import logging
from dataclasses import dataclass, replace

from gmlp_scale.tasks.records import DataError, DataSet, Record, read_records, require_columns, text_mistake

log = logging.getLogger(__name__)

_COLUMNS = ("id", "question", "context", "answers")


@dataclass(frozen=True)
class Answer:
    text: str
    start: int | None
    """Index of its first character in the context; None if the context does not hold it."""

    @property
    def stop(self) -> int:
        """Index behind its last character."""
        return self.start + len(self.text)


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
    if answer.text.strip() and context.startswith(answer.text, answer.start):
        return answer
    places = []
    start = context.find(answer.text) if answer.text.strip() else -1
    while start >= 0:
        places.append(start)
        start = context.find(answer.text, start + 1)
    return replace(answer, start=min(places, key=lambda place: abs(place - answer.start), default=None))
