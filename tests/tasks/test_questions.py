"""Reading SQuAD: its faults are counted, and mistakes named with their place."""

import logging

import pytest

from gmlp_scale.tasks.questions import Answer, read_questions
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.table import TASKS

V1, V2 = TASKS["squad_v1"], TASKS["squad_v2"]
NORMANS = "The Normans gave their name to Normandy, a region in France. The Normans were people."


def read(path, part="train", task=V2):
    return read_questions(str(path), part, task.data_set, task.has_unanswerable)


def mistakes_of(path, task=V2) -> list[str]:
    with pytest.raises(DataError) as error:
        read(path, task=task)
    assert str(path) in str(error.value)
    return error.value.mistakes


def test_squad_json(write_squad):
    path = write_squad("v2.json", [(NORMANS, [("Who?", [("Normans", 4), ("The Normans", 0)]), ("When?", [])])])
    first, second = read(path)
    assert (first.id, first.question, first.context) == ("q0", "Who?", NORMANS)
    assert first.answers == (Answer("Normans", 4), Answer("The Normans", 0))
    assert second.answers == ()


def test_is_impossible_outranks_answers(write_squad):
    path = write_squad("v2.json", [(NORMANS, [("Who?", [("Normans", 4)])])])
    path.write_text(path.read_text().replace('"is_impossible": false', '"is_impossible": true'))
    assert read(path)[0].answers == ()


def test_flat_records_as_datasets_gives_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    answers = {"text": ["Normans"], "answer_start": [4]}
    row = {"id": "x", "title": "T", "context": NORMANS, "question": "Who?", "answers": answers}
    table = datasets.Dataset.from_list([row])
    table.to_json(tmp_path / "a.jsonl")
    table.to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert [(q.id, q.answers) for q in read(tmp_path / name, task=V1)] == [("x", (Answer("Normans", 4),))]


def test_answers_not_at_their_offset(write_squad, caplog):
    questions = [
        ("near the second", [("Normans", 60)]),  # stands at 4 and 65
        ("near the first", [("Normans", 9)]),
        ("nowhere", [("Saxons", 3)]),
        ("one of two", [("Saxons", 3), ("France", 53)]),
        ("empty", [("", 3)]),
    ]
    path = write_squad("train.json", [(NORMANS, questions)])
    with caplog.at_level(logging.WARNING, logger="gmlp_scale"):
        kept = read(path)
    starts = {question.question: question.answers[-1].start for question in kept}
    assert starts == {"near the second": 65, "near the first": 4, "one of two": 53}
    moved = "2 answers stand elsewhere than at their offset; first 'Title' paragraph 1 question q0: 'Normans'"
    assert moved in caplog.text
    assert "3 answers are not in their context, so 2 questions were left out; first" in caplog.text
    assert len(read(path, part="dev")) == 5  # each counts for scoring


def test_every_bad_record_is_named_and_v1_has_no_question_without_answer(write_squad):
    path = write_squad("a.json", [("  ", [("Who?", [])]), (NORMANS, [("", []), ("When?", [])])])
    first, second = "'Title' paragraph 1 question q0: ", "'Title' paragraph 2 question q1: "
    assert mistakes_of(path) == [f"{first}the context is empty", f"{second}the question is empty"]
    path = write_squad("b.json", [(NORMANS, [("Who?", [])])], version="1.1")
    assert mistakes_of(path, V1) == [f"{first}no answer; only task squad_v2 has such questions"]


def flat(answers: str, id: str = '"x"') -> str:
    return f'{{"id": {id}, "context": "c", "question": "q", "answers": {answers}}}'


@pytest.mark.parametrize(
    "name, text, found",
    [
        ("a.json", "{", "is not SQuAD's JSON"),
        ("a.json", '{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "is not SQuAD's JSON"),
        ("a.json", '{"data": []}', "holds no questions that can be used"),
        ("a.json", '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "x"}]}]}]}',
         "'' paragraph 1 question x: no column id and question and context and answers; found context, id"),
        ("a.jsonl", flat("3"), "line 1: answers is 3"),
        ("a.jsonl", flat('{"text": [], "answer_start": []}', id="7"), "line 1: id is 7, which is no text"),
        ("a.jsonl", flat('{"text": ["c"], "answer_start": []}'), "line 1: 1 answers but 0 offsets"),
        ("a.jsonl", flat('{"text": "c", "answer_start": 0}'),
         "line 1: answers is {'text': 'c', 'answer_start': 0}; needed: text and answer_start, a list each"),
        ("a.jsonl", flat('{"text": ["c"], "answer_start": ["0"]}'), "line 1: the offset '0' is no whole number"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, name, text, found):
    (tmp_path / name).write_text(text + "\n")
    mistakes = mistakes_of(tmp_path / name)
    assert len(mistakes) == 1 and mistakes[0].startswith(found)
