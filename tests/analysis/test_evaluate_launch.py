"""launch/evaluate.py on small real runs: one checkpoint, all of them, an export, the probe, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmlp_scale.checkpoint.saved_run import read_all_steps, read_run
from gmlp_scale.data.tokenizer import train_tokenizer
from gmlp_scale.export.folder import export_checkpoint
from gmlp_scale.train.sinks import read_metrics
from launch.evaluate import main
from tests.analysis.conftest import write_shards
from tests.finetune.conftest import write_sentiment

FIGURES = ("loss", "perplexity", "accuracy")


@pytest.fixture
def run_dir(runs, tmp_path) -> Path:
    """A copy of the gMLP run that a test may change."""
    return Path(shutil.copytree(runs / "gmlp", tmp_path / "gmlp"))


def evaluated(succeeds, tmp_path, *options) -> dict:
    succeeds(main, *options, "--output", tmp_path / "result.json")
    return json.loads((tmp_path / "result.json").read_text())


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_training_card_and_both_evaluations_agree(runs, run_dir, tmp_path, succeeds):
    """Training evaluated 4 of the 6 held-out rows after steps 2 and 4."""
    logged = [row for row in read_metrics(run_dir / "metrics.jsonl") if "eval/loss" in row]
    shards = ["--shards", runs / "shards"]
    export_checkpoint(read_run(run_dir, 2), run_dir, tmp_path / "hf")
    of_run = evaluated(succeeds, tmp_path, "--run", run_dir, "--all-steps", *shards)
    of_export = evaluated(succeeds, tmp_path, "--export", tmp_path / "hf", *shards)
    assert [row["step"] for row in of_run["models"]] == [row["step"] for row in logged] == [2, 4]
    for name in FIGURES:
        expected = [pytest.approx(row[f"eval/{name}"], abs=1e-5) for row in logged]
        assert [row[name] for row in of_run["models"]] == expected
        assert of_export["models"][0][name] == expected[0]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| perplexity | {logged[0]['eval/perplexity']:.4f} |" in card and "first 4 held-out rows" in card
    for content in (of_run, of_export):
        assert (content["num_rows"], content["training_differs"]) == (4, [])
        assert content["num_masked_tokens"] == 4 * 5  # 15 % of 32 positions in each row
    assert of_run["unigram"] == of_export["unigram"]


def test_what_differs_from_training_is_printed(runs, run_dir, launched, tmp_path):
    options = ["--run", run_dir, "--output", tmp_path / "result.json"]
    code, printed, _ = launched(main, *options, "--rows", 400, "--shards", runs / "shards")
    assert code == 0 and "in the first 6 held-out rows of" in printed and "in float32 (in training: 4 rows)" in printed
    write_shards(tmp_path / "other", runs / "shards" / "tokenizer", seed=1)
    code, printed, _ = launched(main, *options, "--shards", tmp_path / "other")
    assert code == 0 and "in the first 4 held-out rows of" in printed and "(in training: other shards)" in printed
    assert json.loads((tmp_path / "result.json").read_text())["training_differs"] == ["other shards"]


def test_a_curve_is_printed_and_replaces_the_one_before(runs, run_dir, succeeds):
    options = ["--run", run_dir, "--all-steps", "--shards", runs / "shards"]
    for _ in range(2):
        printed = succeeds(main, *options)
    words = [line.split() for line in printed.splitlines()]
    assert words[1] == ["step", *FIGURES] and [line[0] for line in words[2:]] == ["unigram", "2", "4"]
    found = scalars(run_dir / "tensorboard" / "evaluation")
    assert found.keys() == {f"eval/{name}" for name in FIGURES}
    for column, name in enumerate(FIGURES, start=1):
        expected = [(step, float(words[2 + number][column])) for number, step in enumerate((2, 4), start=1)]
        assert [step for step, _ in found[f"eval/{name}"]] == [2, 4]
        assert found[f"eval/{name}"] == [(step, pytest.approx(value, abs=1e-4)) for step, value in expected]
    assert len(scalars(run_dir / "tensorboard")["eval/loss"]) == 2  # the run's own file is as it was


def test_a_damaged_checkpoint_is_named_and_passed_over(runs, run_dir, launched, tmp_path, refuses):
    (run_dir / "checkpoints" / "step_000000002" / "DONE").unlink()
    options = ["--run", run_dir, "--all-steps", "--shards", runs / "shards"]
    code, printed, error = launched(main, *options)
    assert code == 0 and "checkpoint passed over: step_000000002 has no DONE" in error
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["unigram", "4"]
    (run_dir / "checkpoints" / "step_000000004" / "DONE").unlink()
    refuses("holds no complete checkpoint", main, *options)


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_passed_over(run_dir, caplog):
    checkpoints = read_all_steps(run_dir)
    assert next(checkpoints).step == 2
    shutil.rmtree(run_dir / "checkpoints" / "step_000000004")
    assert not list(checkpoints) and "passed over" in caplog.text and "step 4; it has those of 2" in caplog.text


def test_figures_are_printed_and_written_where_the_curve_cannot_be(runs, run_dir, launched, tmp_path):
    shutil.rmtree(run_dir / "tensorboard")
    (run_dir / "tensorboard").touch()
    options = ["--run", run_dir, "--all-steps", "--shards", runs / "shards", "--output", tmp_path / "result.json"]
    code, printed, error = launched(main, *options)
    assert code and "tensorboard" in error
    steps = [model["step"] for model in json.loads((tmp_path / "result.json").read_text())["models"]]
    assert steps == [2, 4] and [line.split()[0] for line in printed.splitlines()[2:]] == ["unigram", "2", "4"]


def test_the_probe_finetunes_each_checkpoint(runs, run_dir, tmp_path, succeeds):
    data = [f"data.train={write_sentiment(tmp_path / 'train.tsv', 40)}"]
    data += [f"data.dev={write_sentiment(tmp_path / 'dev.tsv', 10, first=40)}"]
    brief = ["data.sequence_length=32", "train.num_steps=2", "train.precision=float32", "train.micro_batch_size=4"]
    probe = ["--finetune-probe", "sst2", *data, *brief]
    content = evaluated(succeeds, tmp_path, "--run", run_dir, "--all-steps", "--shards", runs / "shards", *probe)
    scores = [(row["step"], row["probe_sst2_accuracy"]) for row in content["models"]]
    assert [step for step, _ in scores] == [2, 4] and all(0 <= score <= 1 for _, score in scores)
    assert scalars(run_dir / "tensorboard" / "probe") == {"eval/probe_sst2_accuracy": [
        (step, pytest.approx(score)) for step, score in scores
    ]}  # fmt: skip


def test_a_probe_s_mistakes_are_reported_before_anything_is_evaluated(runs, run_dir, tmp_path, monkeypatch, refuses):
    monkeypatch.setattr("launch.evaluate.evaluate_models", None)
    options = ["--run", run_dir, "--shards", runs / "shards", "--finetune-probe", "sst2"]
    dev = write_sentiment(tmp_path / "dev.tsv", 10)
    error = refuses("3 mistakes", main, *options, "data.train=nope.tsv", f"data.dev={dev}", "data.test=no/t.tsv")
    assert f"data.sequence_length: found 128; the run at {run_dir} takes at most 32" in error
    assert "data.train: nope.tsv does not exist" in error and "data.test: no/t.tsv does not exist" in error
    data = [f"data.train={dev}", f"data.dev={dev}", "data.sequence_length=32"]
    refuses("train.micro_batch_size: found 5", main, *options, *data, "train.micro_batch_size=5")


def test_mistakes_are_one_message_and_leave_with_2(runs, run_dir, tmp_path, refuses):
    shards = ["--shards", runs / "shards"]
    export_checkpoint(read_run(run_dir, 4), run_dir, tmp_path / "hf")
    train_tokenizer(["abcdefghijklmnopqrst " * 3] * 100, 282, tmp_path / "other")
    write_shards(tmp_path / "other_tokenizer", tmp_path / "other")
    write_shards(tmp_path / "longer", runs / "shards" / "tokenizer", sequence_length=64)
    for options, message in (
        (["--run", run_dir, "--shards", tmp_path / "other_tokenizer"], "was written with another tokenizer than that"),
        (["--export", tmp_path / "hf", "--shards", tmp_path / "longer"], "is 32, the shards have 64"),
        (["--run", run_dir, "--step", 3, *shards], "has no checkpoint of step 3; it has those of 2, 4"),
        (["--run", tmp_path, *shards], "no run at"),
        (["--run", run_dir, "--shards", tmp_path / "nowhere"], "no shards at"),
        (["--export", tmp_path / "hf", "--all-steps", *shards], "need --run"),
        (["--export", tmp_path / "hf", "--step", 0, *shards], "need --run"),
        (["--run", run_dir, "--rows", 0, *shards], "--rows: found 0"),
        (["--run", run_dir, "--rows", -1, *shards], "--rows: found -1"),
        (["--run", run_dir, "data.train=x", *shards], "only --finetune-probe takes such fields"),
        (["--run", run_dir, *shards, "--finetune-probe", "sst2", "model=x"], "a probe decides this by itself"),
        (["--run", run_dir, *shards, "--finetune-probe", "sst2", "data.dve=x"], "did you mean dev?"),
        (["--run", run_dir, *shards, "--finetune-probe", "rte"], "data.train: found None"),  # GLUE's recipe
    ):
        refuses(message, main, *options)
    (tmp_path / "hf" / "tokenizer.model").unlink()
    refuses("no tokenizer at", main, "--export", tmp_path / "hf", *shards)


def test_an_export_without_a_recipe_is_refused(runs, run_dir, tmp_path, refuses):
    export_checkpoint(read_run(run_dir, 4), run_dir, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"details": {}}))
    (tmp_path / "hf" / "SHA256SUMS").unlink()
    refuses("holds no recipe of pretraining", main, "--export", tmp_path / "hf", "--shards", runs / "shards")
