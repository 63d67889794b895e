"""SQuAD: rows, and gold answers that come back through rows and decoding."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.tasks.scores import exact_match
from gmlp_scale.tasks.table import TASKS

V1, V2 = TASKS["squad_v1"], TASKS["squad_v2"]
NORMANS = "The Normans gave their name to Normandy, a region in France. The Normans were people."
SQUAD = Path(__file__).parents[2] / ".." / "shared" / "data" / "squad"


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
