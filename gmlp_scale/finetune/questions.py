"""SQuAD's questions, read and checked."""

import logging
from dataclasses import dataclass, replace

from gmlp_scale.finetune.sources import DataError, Hub, Record, read_records, require_columns, text_mistake

log = logging.getLogger(__name__)

_COLUMNS = ("id", "question", "context", "answers")


@dataclass(frozen=True)
class Answer:
    text: str
    start: int | None
    """Its first character in the context; None where the context does not hold it."""


@dataclass(frozen=True)
class Question:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """None in a question that cannot be answered."""


def read_questions(source: str, part: str, hub: Hub, has_unanswerable: bool) -> list[Question]:
    """Every question of a source in its order.

    An answer that is not at its offset is looked for in the context: the place nearest to the offset is taken, and if
    there is none the answer has no place, and counts for scoring alone. In training a question that had answers and
    has none with a place is left out. A warning counts them.

    Raises:
        DataError: no questions, a missing column, or every record that cannot be used, with its place.
    """
    questions, mistakes = [], []
    moved, lost = [], []
    num_left_out = 0
    for record in read_records(source, part, hub):
        require_columns(source, record, [_COLUMNS])
        found = _record_mistakes(record, has_unanswerable)
        mistakes += found
        if found:
            continue
        question = _question(record)
        placed = tuple(_placed(answer, question.context) for answer in question.answers)
        for answer, place in zip(question.answers, placed, strict=True):
            if place.start != answer.start:
                (lost if place.start is None else moved).append(f"{record.place}: {answer.text!r}")
        if part == "train" and placed and all(answer.start is None for answer in placed):
            num_left_out += 1
            continue
        questions.append(replace(question, answers=placed))
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
    answers = fields["answers"]
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
        return [*mistakes, f"{record.place}: answers is {answers!r}; it holds text and answer_start"]
    if len(answers["text"]) != len(answers["answer_start"]):
        mistakes.append(f"{record.place}: {len(answers['text'])} answers but {len(answers['answer_start'])} offsets")
    mistakes += filter(None, (text_mistake(record.place, "an answer", text) for text in answers["text"]))
    if not len(answers["text"]) and not has_unanswerable:
        mistakes.append(f"{record.place}: no answer; only task squad_v2 has such questions")
    return mistakes


def _question(record: Record) -> Question:
    fields = record.fields
    pairs = zip(fields["answers"]["text"], fields["answers"]["answer_start"], strict=True)
    answers = tuple(Answer(text, start) for text, start in pairs)
    return Question(fields["id"], fields["question"], fields["context"], answers)


def _placed(answer: Answer, context: str) -> Answer:
    """The answer at its offset, or at the place nearest to it, or without one."""
    if answer.text.strip() and context.startswith(answer.text, answer.start):
        return answer
    places = []
    start = context.find(answer.text) if answer.text.strip() else -1
    while start >= 0:
        places.append(start)
        start = context.find(answer.text, start + 1)
    return replace(answer, start=min(places, key=lambda place: abs(place - answer.start), default=None))
