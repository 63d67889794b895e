"""Whole finetuning runs on tiny models: what they leave, resuming, and what they refuse."""

import json
import logging

import numpy as np
import pytest
import torch
from transformers import pipeline

from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.data.batch_plan import BatchPlan, EpochLoader
from gmlp_scale.distributed.world import World
from gmlp_scale.engine.single import SingleEngine
from gmlp_scale.finetune.finetuning import Finetuning, finetune, read_inputs
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.tasks.table import summarize_all
from gmlp_scale.train.sinks import read_metrics
from tests.finetune.conftest import sentiment_run, tiny_run, write_tiny_export


def go(run, world):
    return finetune(run, read_inputs(run), world)


def with_test(tmp_path, *lines: str) -> str:
    """Writes a test file; the override that gives it to a run."""
    (tmp_path / "test.tsv").write_text("\n".join(lines) + "\n")
    return f"data.test={tmp_path / 'test.tsv'}"


def logged(run, tag: str) -> dict[int, float]:
    return {row["step"]: row[tag] for row in read_metrics(run.run_dir / "metrics.jsonl") if tag in row}


def test_a_run_learns_and_leaves_scores_weights_and_predictions(tmp_path, export, world):
    test = with_test(tmp_path, "index\tsentence", "4\tthe great film", "9\tthe awful film")
    fast = ("train.num_steps=40", "optimizer.peak_learning_rate=2e-2", "dropout=0.0", "train.evaluate_every_steps=10")
    run = sentiment_run(tmp_path, export, *fast, test)
    scores = go(run, world)
    assert scores == json.loads((run.run_dir / "scores.json").read_text())
    assert scores["scores"]["dev"]["accuracy"] > 0.9 and "test" not in scores["scores"]
    assert scores["num_examples"] == {"train": 60, "dev": 21, "test": 2}
    assert logged(run, "eval/accuracy")[40] == scores["scores"]["dev"]["accuracy"]
    assert sorted(logged(run, "eval/loss")) == [10, 20, 30, 40] and len(logged(run, "train/loss")) == 40
    assert (run.run_dir / "predictions" / "test" / "SST-2.tsv").read_text() == "index\tprediction\n4\t1\n9\t0\n"

    last, best = read_export(run.run_dir / "last"), read_export(run.run_dir / "best")
    assert (last.head, last.labels, last.row_length) == ("sequence_classification", ("negative", "positive"), 16)
    assert best.details["finetuned"]["step"] == scores["best"]["step"]
    assert scores["best"]["score"] == max(logged(run, "eval/accuracy").values())
    assert last.details["pretrained"] == {"step": 3}
    # The exported weights are those that were scored.
    model = last.build()
    rows = read_inputs(run).rows["dev"]
    with torch.no_grad():
        logits = model.eval().predict(rows.batch(np.arange(rows.num_rows))).numpy()
    assert rows.scores(logits)["loss"] == pytest.approx(scores["scores"]["dev"]["loss"], rel=1e-5)
    lines = (run.run_dir / "predictions" / "dev" / "SST-2.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines] == [str(label) for label in logits.argmax(-1)]


def test_resumed_run_is_the_run_that_was_never_stopped(tmp_path, export, world):
    whole = sentiment_run(tmp_path, export, "name=whole")
    go(whole, world)
    for stop in (3, 8):
        assert go(sentiment_run(tmp_path, export, "name=parts", f"train.stop_after_step={stop}"), world) is None
    parts = sentiment_run(tmp_path, export, "name=parts")
    scores = go(parts, world)
    for tag in ("train/loss", "train/grad_norm", "eval/loss"):
        assert logged(parts, tag) == logged(whole, tag)
    one, other = read_export(parts.run_dir / "last").weights, read_export(whole.run_dir / "last").weights
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert scores["best"] == json.loads((whole.run_dir / "scores.json").read_text())["best"]


@pytest.mark.parametrize("num_batches, stopped_at", [(8, 10), (18, 12)], ids=["an evaluation", "the scores at the end"])
def test_a_stop_signal_cuts_scoring_off_which_begins_again_on_resume(
    tmp_path, export, world, monkeypatch, num_batches, stopped_at
):
    test = with_test(tmp_path, "sentence", "the good film")
    whole, parts = (sentiment_run(tmp_path, export, f"name={name}", test) for name in ("whole", "parts"))
    expected = go(whole, world)
    predict, num_predicted = SingleEngine.predict, 0

    def counted(self, batch):
        nonlocal num_predicted
        num_predicted += 1
        return predict(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SingleEngine, "predict", counted)
        patch.setattr(World, "is_stop_signalled", property(lambda self: num_predicted >= num_batches))
        assert go(parts, world) is None
    assert num_predicted == num_batches and list(logged(parts, "train/loss"))[-1] == stopped_at
    found = go(parts, world)
    assert {**found, "config": None} == {**expected, "config": None}
    for tag in ("train/loss", "eval/loss"):
        assert logged(parts, tag) == logged(whole, tag)


def test_a_finished_run_writes_its_results_again_and_trains_no_more(tmp_path, export, world):
    run = sentiment_run(tmp_path, export)
    first = go(run, world)
    before = logged(run, "train/loss")
    (run.run_dir / "scores.json").unlink()
    again = go(sentiment_run(tmp_path, export, with_test(tmp_path, "sentence", "the good film")), world)
    assert again["scores"] == first["scores"] and logged(run, "train/loss") == before
    assert (run.run_dir / "predictions" / "test" / "SST-2.tsv").exists()


def test_a_labelled_test_file_is_scored_once_at_the_end(tmp_path, export, world, caplog):
    lines = ["index\tsentence\tlabel", "4\tthe great film\t1", "9\tthe awful film\t1", "12\tgood\t1"]
    run = sentiment_run(tmp_path, export, "train.num_steps=4", with_test(tmp_path, *lines))
    with caplog.at_level(logging.INFO, logger="gmlp_scale"):
        scores = go(run, world)["scores"]
    assert set(scores) == {"dev", "test"} and set(scores["test"]) == {"accuracy", "loss"}
    lines = (run.run_dir / "predictions" / "test" / "SST-2.tsv").read_text().splitlines()[1:]
    assert scores["test"]["accuracy"] == pytest.approx(sum(line.endswith("\t1") for line in lines) / 3)
    assert f"accuracy_test: {100 * scores['test']['accuracy']:.2f}" in caplog.text
    assert not any("test" in tag for row in read_metrics(run.run_dir / "metrics.jsonl") for tag in row)


def test_best_weights_of_a_step_that_was_lost_do_not_hide_the_ones_that_count(tmp_path, export, world):
    run = sentiment_run(tmp_path, export, "train.stop_after_step=4", "train.evaluate_every_steps=1")
    go(run, world)
    best_config = run.run_dir / "best" / "config.json"
    content = json.loads(best_config.read_text())
    content["details"]["finetuned"]["step"] = 7  # killed after the evaluation of step 7 and before its checkpoint
    content["details"]["finetuned"]["scores"]["dev"]["accuracy"] = 2.0
    best_config.write_text(json.dumps(content))
    finished = sentiment_run(tmp_path, export, "train.evaluate_every_steps=1")
    scores = go(finished, world)
    after = {step: value for step, value in logged(finished, "eval/accuracy").items() if step > 4}
    assert scores["best"]["score"] == max(after.values())


def test_what_a_killed_run_left_of_an_export_goes_with_the_next_one(tmp_path, export, world):
    run = sentiment_run(tmp_path, export, "train.num_steps=2")
    for name in (".best.new.unfinished-1", ".last.new.unfinished-12", "best.old", "last.new"):
        (run.run_dir / name).mkdir(parents=True)
    go(run, world)
    assert not [path.name for path in run.run_dir.iterdir() if "best." in path.name or "last." in path.name]


def test_another_run_and_other_texts_are_refused_but_a_moved_file_is_not(tmp_path, export, world):
    go(sentiment_run(tmp_path, export, "train.stop_after_step=1"), world)
    for override, found in {
        "seed=5": "seed: the checkpoint was trained with 0; the run says 5",
        "dropout=0.2": "dropout: the checkpoint was trained with 0.1; the run says 0.2",
        "data.sequence_length=12": "data train_sha256",
    }.items():
        with pytest.raises(ConfigError, match=found):
            go(sentiment_run(tmp_path, export, override), world)
    (tmp_path / "train.tsv").rename(tmp_path / "moved.tsv")
    moved = sentiment_run(tmp_path, export, "train.stop_after_step=2", f"data.train={tmp_path / 'moved.tsv'}")
    go(moved, world)
    text = (tmp_path / "moved.tsv").read_text()
    (tmp_path / "moved.tsv").write_text(text.replace("good", "dull"))
    with pytest.raises(ConfigError, match="data train_sha256: the checkpoint was trained with"):
        go(moved, world)


def test_schedule_and_length_must_fit(tmp_path, export, world):
    run = sentiment_run(tmp_path, export, "train.num_steps=null", "train.num_epochs=2", "train.stop_after_step=16")
    with pytest.raises(ConfigError, match=r"train.stop_after_step: found 16; must be at most train.num_steps = 15"):
        go(run, world)
    with pytest.raises(ConfigError, match=r"data.sequence_length: found 256; the model at .* takes at most 128"):
        read_inputs(sentiment_run(tmp_path, export, "data.sequence_length=256"))


def test_dev_data_that_are_the_training_data_are_warned_of(tmp_path, export, caplog):
    run = sentiment_run(tmp_path, export)
    (tmp_path / "dev.tsv").write_text((tmp_path / "train.tsv").read_text())
    with caplog.at_level(logging.WARNING, logger="gmlp_scale"):
        read_inputs(run)
    assert f"data.dev holds the training data ({tmp_path / 'dev.tsv'})" in caplog.text


def test_pretrained_weights_are_taken_for_the_trunk_alone(tmp_path, export):
    weights, models = read_export(export).weights, {}
    for pretrained in (True, False):
        run = sentiment_run(tmp_path, export, f"pretrained={str(pretrained).lower()}")
        task = Finetuning(run, read_inputs(run))
        models[pretrained] = task.build_model()
        task.initialise(models[pretrained])
    for name, parameter in models[True].named_parameters():
        expected = models[False].get_parameter(name) if name.startswith("classifier.") else weights[name]
        assert torch.equal(parameter, expected)
    assert not torch.equal(models[False].embedding.weight, weights["embedding.weight"])


def test_sts_b_learns_its_numbers(tmp_path, export, world):
    """One word decides the score."""
    words = {"awful": 0.0, "boring": 1.5, "good": 3.5, "great": 5.0}
    for part, numbers in (("train", range(60)), ("dev", range(60, 80))):
        lines = ["sentence1\tsentence2\tscore"]
        for number in numbers:
            word, place = [*words][number % 4], ("film", "story", "music")[number % 3]
            lines.append(f"the {place} {number}\ta {word} {place}\t{words[word]}")
        (tmp_path / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    run = tiny_run(
        tmp_path, export, "name=stsb", "task=stsb", f"data.train={tmp_path / 'train.tsv'}",
        f"data.dev={tmp_path / 'dev.tsv'}", "train.num_steps=60", "optimizer.peak_learning_rate=2e-2", "dropout=0.0",
        "train.evaluate_every_steps=60", "checkpoint.save_every_steps=60", task="glue",
    )  # fmt: skip
    scores = go(run, world)
    assert scores["scores"]["dev"]["pearson"] > 0.9 and scores["scores"]["dev"]["loss"] < 1.0
    assert logged(run, "train/loss")[60] < logged(run, "train/loss")[1] / 4
    last = read_export(run.run_dir / "last")
    assert last.labels == ("similarity",)
    rows = read_inputs(run).rows["dev"]
    with torch.no_grad():
        logits = last.build().predict(rows.batch(np.arange(rows.num_rows))).numpy()
    assert rows.scores(logits)["spearman"] == pytest.approx(scores["scores"]["dev"]["spearman"], abs=1e-6)


@pytest.mark.parametrize("masks_padding", [True, False])
def test_a_batch_is_as_long_as_its_longest_row_if_the_model_masks_padding(
    tmp_path, tokenizer_folder, world, masks_padding
):
    export = write_tiny_export(tmp_path / "hf", tokenizer_folder, masks_padding=masks_padding)
    task = Finetuning(run := sentiment_run(tmp_path, export, "data.sequence_length=64"), read_inputs(run))
    lengths_R = (task.inputs.rows["train"].token_ids_RN != 0).sum(1)
    loader = task.open_loader(world)
    for step, batches in enumerate(loader.steps(0, 7)):
        for batch, row_indices in zip(batches, loader.row_indices(step), strict=True):
            longest = -(-lengths_R[row_indices].max() // 8) * 8
            assert batch.token_ids_BN.shape[1] == (longest if masks_padding else 64) and longest < 64
    assert task.tokens_per_step.last == 8 * (round(lengths_R.mean()) if masks_padding else 64)


def test_squad_v2_runs_to_its_predictions(tmp_path, export, world, write_squad):
    context = "The Normans gave their name to Normandy, a region in France. " * 4
    paragraphs = [(context, [("Who gave the name?", [("The Normans", 0)]), ("Which century?", [])])]
    path = write_squad("train.json", paragraphs)
    run = tiny_run(
        tmp_path, export, f"data.train={path}", f"data.dev={path}", "data.sequence_length=96",
        "data.document_stride=32", "train.num_steps=3", "train.global_batch_size=4", "grid.global_batch_size=[4]",
        task="squad_v2",
    )  # fmt: skip
    scores = go(run, world)
    assert scores["scores"]["dev"]["total"] == 2 and 0 <= scores["scores"]["dev"]["best_f1"] <= 100
    last = json.loads((run.run_dir / "last" / "config.json").read_text())
    assert last["document_stride"] == run.data.document_stride
    assert logged(run, "eval/f1")[3] == scores["scores"]["dev"]["f1"]
    folder = run.run_dir / "predictions" / "dev"
    for name in ("predictions", "null_odds", "span_predictions"):
        assert set(json.loads((folder / f"{name}.json").read_text())) == {"q0", "q1"}
    assert read_export(run.run_dir / "last").head == "question_answering"


def test_tagging_learns_and_its_export_tags_as_the_predictions_do(tmp_path, export, world):
    names = {"Norman": "B-PER", "Denver": "B-LOC", "Broncos": "I-LOC"}
    words = ["Norman", "watch", "Denver", "Broncos", "trees", "people"]
    for part, numbers in (("train", range(60)), ("dev", range(60, 75))):
        sentences = [[words[n % 2 * 2], "the", *words[n % 2 * 2 :][: 2 + n % 3], f"{n}"] for n in numbers]
        lines = [[f"{word} {names.get(word, 'O')}" for word in sentence] for sentence in sentences]
        text = "\n\n".join("\n".join(sentence) for sentence in lines)
        (tmp_path / f"{part}.txt").write_text(text.replace("the O\nBroncos I-LOC", "the O\nBroncos B-LOC"))
    run = tiny_run(
        tmp_path, export, f"data.train={tmp_path}/train.txt", f"data.dev={tmp_path}/dev.txt",
        f"data.test={tmp_path}/dev.txt", "data.sequence_length=32", "data.entity_types=[LOC, PER]",
        "train.num_steps=60", "train.evaluate_every_steps=60",
        "optimizer.peak_learning_rate=2e-2", "dropout=0.0", "checkpoint.save_every_steps=60", task="tagging",
    )  # fmt: skip
    scores = go(run, world)["scores"]
    assert scores["dev"]["f1"] > 0.9 and scores["test"] == scores["dev"]
    assert logged(run, "eval/f1")[60] == scores["dev"]["f1"]
    last = read_export(run.run_dir / "last")
    assert (last.head, last.labels) == ("token_classification", ("O", "B-LOC", "I-LOC", "B-PER", "I-PER"))
    assert all(torch.equal(weight, last.weights[name]) for name, weight in last.build().named_parameters())
    given = {"trust_remote_code": True, "aggregation_strategy": "first"}
    tag = pipeline("token-classification", str(run.run_dir / "last"), **given)
    lines = (run.run_dir / "predictions" / "dev" / "predictions.conll").read_text().split("\n\n")[:-1]
    predicted = [[line.split(" ") for line in sentence.splitlines()] for sentence in lines]
    for sentence, found in zip(predicted, tag([" ".join(word for word, _ in s) for s in predicted]), strict=True):
        ours = [word for word, label in sentence if label != "O"]
        assert " ".join(group["word"].strip() for group in found).split() == ours
    card = (run.run_dir / "last" / "README.md").read_text()
    assert 'pipeline("token-classification"' in card and "| dev f1 |" in card


@pytest.mark.parametrize("like_lengths", [False, True])
def test_order_is_a_pure_function_of_the_step(tmp_path, export, like_lengths):
    rows = read_inputs(sentiment_run(tmp_path, export)).rows["train"]
    lengths_R = np.arange(60) % 13 if like_lengths else None

    def loader(rank=0, world_size=1, micro_batch_size=4, seed=0, global_batch_size=16):
        plan = BatchPlan(seed, Piecewise(global_batch_size), micro_batch_size, rank, world_size)
        return EpochLoader(rows, plan, lengths_R)

    def row_indices(step, *plan, **fields):
        return loader(*plan, **fields).row_indices(step).ravel()

    whole = np.concatenate([row_indices(step) for step in range(15)])  # 240 rows: 4 epochs of 60
    for epoch in range(4):
        assert sorted(whole[60 * epoch : 60 * (epoch + 1)]) == list(range(60))
    assert len({tuple(whole[60 * epoch : 60 * (epoch + 1)]) for epoch in range(4)}) == 4
    assert not np.array_equal(whole[:60], np.concatenate([row_indices(step, seed=1) for step in range(4)])[:60])
    halves = [np.concatenate([row_indices(step, rank, 2) for rank in (0, 1)]) for step in range(15)]
    assert np.array_equal(np.concatenate(halves), whole)
    growing = [row_indices(5, rank, 2, global_batch_size=[(0, 8), (2, 16)]) for rank in (0, 1)]
    assert np.array_equal(np.concatenate(growing), whole[2 * 8 + 3 * 16 :][:16])
    batches = [batch for step in loader(micro_batch_size=2).steps(3, 5) for batch in step]
    assert len(batches) == 16
    for batch, row_indices_B in zip(batches, whole[48:80].reshape(16, 2), strict=True):
        assert torch.equal(batch.token_ids_BN, rows.batch(row_indices_B).token_ids_BN)
    if like_lengths:  # steps 3, 7 and 11 take the end of one epoch and the beginning of the next
        spreads = [np.ptp(lengths_R[whole[16 * step :][:16]]) for step in range(15)]
        assert max(spread for step, spread in enumerate(spreads) if step % 4 != 3) <= 4, spreads
        sums = np.array([lengths_R[whole[16 * step :][:16]].sum() for step in range(15)])
        assert len({sums[first : first + 3].argmin() for first in (0, 4, 8, 12)}) > 1  # in random order


@pytest.mark.parametrize("batch_size", [1, 4, 21, 64])
def test_what_fills_up_the_last_batch_counts_nowhere(tmp_path, export, world, batch_size):
    rows = read_inputs(sentiment_run(tmp_path, export)).rows["dev"]

    def predict(batch):
        assert len(batch.token_ids_BN) == batch_size
        sums_B = batch.token_ids_BN.sum(dim=1).float()
        return torch.stack([sums_B, -sums_B], dim=1)

    sums = rows.token_ids_RN.astype(np.int64).sum(axis=1)
    plan = BatchPlan(0, Piecewise(batch_size), batch_size)
    assert summarize_all(rows, predict, world, plan).tolist() == [[value, -value] for value in sums]
