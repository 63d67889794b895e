"""SQuAD: its faults are counted or named with their place; rows, and gold answers that come back through decoding."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.tasks.question_answering import Answer, read_questions
from gmlp_scale.tasks.records import DataError
from gmlp_scale.tasks.scores import exact_match
from gmlp_scale.tasks.table import TASKS

V1, V2 = TASKS["squad_v1"], TASKS["squad_v2"]
NORMANS = "The Normans gave their name to Normandy, a region in France. The Normans were people."
SQUAD = Path(__file__).parents[2] / ".." / "shared" / "data" / "squad"


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
        ("before the start", [("France.", -7)]),  # Python would count from the end
    ]
    path = write_squad("train.json", [(NORMANS, questions)])
    with caplog.at_level(logging.WARNING, logger="gmlp_scale"):
        kept = read(path)
    starts = {question.question: question.answers[-1].start for question in kept}
    assert starts == {"near the second": 65, "near the first": 4, "one of two": 53, "before the start": 53}
    moved = "3 answers stand elsewhere than at their offset; first 'Title' paragraph 1 question q0: 'Normans'"
    assert moved in caplog.text
    assert "3 answers are not in their context, so 2 questions were left out; first" in caplog.text
    assert len(read(path, part="dev")) == 6  # each counts for scoring


def test_every_bad_record_is_named_and_v1_has_no_question_without_answer(write_squad):
    path = write_squad("a.json", [("  ", [("Who?", [])]), (NORMANS, [("", []), ("When?", [])])])
    first, second = "'Title' paragraph 1 question q0: ", "'Title' paragraph 2 question q1: "
    assert mistakes_of(path) == [f"{first}the context is empty", f"{second}the question is empty"]
    path = write_squad("b.json", [(NORMANS, [("Who?", [])])], version="1.1")
    assert mistakes_of(path, V1) == [f"{first}no answer; only task squad_v2 has such questions"]


def test_questions_of_one_id_are_refused_since_scores_go_by_it(write_squad):
    path = write_squad("a.json", [(NORMANS, [("Who?", [("Normans", 4)]), ("What?", [("Normans", 4)])])])
    path.write_text(path.read_text().replace('"q1"', '"q0"'))
    assert mistakes_of(path) == ["id q0 stands there 2 times: give each question its own"]


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


def test_rows_of_windows(write_squad, tokenizer):
    context = " ".join([NORMANS] * 6)
    answer = context.index("France", 300)
    path = write_squad("a.json", [(context, [("Where is it?" * 40, [("France", answer)]), ("When?", [])])])
    rows = V2.read(str(path), "train", tokenizer, 128, 32)
    question = tokenizer.encode("Where is it?" * 40)[:64]
    context_ids = tokenizer.encode(context)
    num_inside = 0
    for row, ids, (first, last) in zip(rows.rows, rows.token_ids_RN.tolist(), rows.answers_R2.tolist(), strict=True):
        window = row.window
        if row.question_index == 0:
            expected = [2, *question, 3, *context_ids[window.first : window.stop], 3]
            assert ids == expected + [0] * (128 - len(expected))
            if first:
                num_inside += 1
                assert tokenizer.decode(ids[first : last + 1]).strip(" .") == "France"
            else:
                assert last == 0
        else:
            assert (first, last) == (0, 0)
    assert 0 < num_inside < sum(row.question_index == 0 for row in rows.rows)
    batch = rows.batch(np.array([3, 0]))
    assert batch.token_ids_BN[0].tolist() == rows.token_ids_RN[3].tolist()
    assert batch.first_positions_B.tolist() == rows.answers_R2[[3, 0], 0].tolist()


def gold_summaries(rows) -> np.ndarray:
    """What a model that knows every row's answer would give."""
    parts = []
    for start in range(0, rows.num_rows, 256):
        answers_B2 = torch.from_numpy(rows.answers_R2[start : start + 256])
        logits_BN2 = torch.zeros(len(answers_B2), rows.token_ids_RN.shape[1], 2)
        parts.append(rows.summarize(logits_BN2.scatter(1, answers_B2.unsqueeze(1), 10.0)).numpy())
    return np.concatenate(parts)


def test_gold_answers_come_back_and_predictions_are_written(write_squad, tokenizer, tmp_path):
    context = "  ".join([NORMANS] * 5)
    paragraphs = [
        (context, [("Where?", [("region in France", context.index("region", 200))]), ("Which century?", [])]),
        ("Denver Broncos — “good” é.", [("Who?", [("Denver Broncos", 0)]), ("What?", [("“good” é", 17)])]),
    ]
    rows = V2.read(str(write_squad("a.json", paragraphs)), "dev", tokenizer, 80, 32)
    summaries = gold_summaries(rows)
    scores = rows.scores(summaries)
    assert (scores["exact"], scores["f1"], scores["total"], scores["NoAns_total"]) == (100, 100, 4, 1)
    rows.write_predictions(summaries, tmp_path)
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert predictions == {"q0": "region in France", "q1": "", "q2": "Denver Broncos", "q3": "“good” é"}
    odds = json.loads((tmp_path / "null_odds.json").read_text())
    assert odds["q1"] > 0 and all(odds[id] < 0 for id in ("q0", "q2", "q3"))
    spans = json.loads((tmp_path / "span_predictions.json").read_text())
    assert spans["q1"] and {id: text for id, text in spans.items() if id != "q1"}.items() <= predictions.items()


def test_v1_writes_predictions_alone(write_squad, tokenizer, tmp_path):
    path = write_squad("a.json", [(NORMANS, [("Who?", [("Normans", 4)])])], version="1.1")
    rows = V1.read(str(path), "dev", tokenizer, 100, 32)
    summaries = gold_summaries(rows)
    assert rows.scores(summaries) == {"exact_match": 100, "f1": 100}
    rows.write_predictions(summaries, tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"q0": "Normans"}
    assert not (tmp_path / "null_odds.json").exists()


@pytest.mark.skipif(not SQUAD.is_dir(), reason=f"needs {SQUAD}")
def test_gold_answers_of_squad_come_back(tmp_path, capsys):
    contexts = {
        paragraph["context"]
        for path in SQUAD.glob("*.json")
        for article in json.loads(path.read_text())["data"]
        for paragraph in article["paragraphs"]
    }
    train_tokenizer(sorted(contexts), 13_000, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    for task, version in ((V1, "v1.1"), (V2, "v2.0")):
        for part in ("train", "dev"):
            rows = task.read(str(SQUAD / f"{part}-{version}.devsplit.json"), "dev", tokenizer, 512, 128)
            summaries = gold_summaries(rows)
            scores, (texts, _) = rows.scores(summaries), rows.answers(summaries)
            lost = [
                (question.answers[0].text, texts[question.id])
                for question in rows.questions
                if question.answers and not any(exact_match(texts[question.id], a.text) for a in question.answers)
            ]
            with capsys.disabled():
                print(f"\n{version} {part}: {len(lost)} of {rows.num_examples} answers are lost, such as {lost[:4]}")
            assert (scores.get("exact_match") or scores["exact"]) >= 99.5
