"""launch/finetune.py: dry run, a whole run, mistakes and their exit codes."""

import re

import pytest

from gmlp_scale.distributed import logs, world
from gmlp_scale.train import agreement
from launch import finetune as launcher
from tests.finetune.conftest import RECIPES, sentiment_run


@pytest.fixture
def launch(tmp_path, export, launched):
    """launch(*arguments) -> (exit code, standard output, standard error), on the tiny run of sentiment_run."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(sentiment_run(tmp_path, export, "train.num_steps=2").to_yaml())
    return lambda *arguments, config=recipe: launched(launcher.main, "--config", config, *arguments)


def test_dry_run_starts_nothing(launch, tmp_path):
    code, out, _ = launch("--dry-run", "--grid", "--seeds", "3")
    assert code == 0 and not (tmp_path / "outputs").exists()
    assert "train                   60 examples, 60 rows of 16 tokens" in out
    assert "steps                   2, 0 of them warm-up; 0.27 epochs" in out
    assert "runs                    4: " in out and "batch_16_rate_0.001_seed_0: 2 steps" in out
    assert "would resume from       nothing: a new run" in out


def test_a_run_and_its_resume(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LINE_EVERY_SECONDS", 0.0)
    code, _, log = launch()
    assert code == 0
    assert re.search(r"^    data +sst2, train \d+ examples, dev \d+ examples", log, re.MULTILINE)
    assert "evaluation:   0%" in log
    assert (tmp_path / "outputs" / "sst2" / "scores.json").exists()
    assert "step_000000002" in launch("--dry-run")[1]


def test_the_recipe_s_device_is_asked_for(launch, monkeypatch):
    asked = []

    def start_world(timeout_seconds, device, **options):
        asked.append(device)
        return world.start_world(timeout_seconds, "cpu", **options)

    monkeypatch.setattr(agreement, "start_world", start_world)
    assert launch("train.device=cuda")[0] == 0
    assert asked == ["cuda"]


def test_grid_refuses_the_fields_that_it_sets_itself(launch):
    fields = ("optimizer.peak_learning_rate=5e-4", "train.global_batch_size=8")
    code, _, error = launch("--dry-run", "--grid", *fields)
    assert code == 2 and "2 mistakes" in error
    needed = "--grid takes grid.peak_learning_rate; give grid.peak_learning_rate=[5e-4], or leave --grid out"
    assert needed in error and "give grid.global_batch_size=[8], or leave --grid out" in error
    assert launch("--dry-run", "--seeds", "2", *fields)[0] == 0


def test_mistakes_leave_with_2_and_nothing_behind(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    files = {"wrong.tsv": "sentence\tlabel\nx\t7\n", "run/config.yaml": "", "tuned/scores.json": "", "file": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run, tuned = tmp_path / "run", tmp_path / "tuned"
    for arguments, found in {
        ("train.micro_batch_size=3", "seed=-1"): "seed",
        ("train.micro_batch_size=3",): "must divide",
        ("--dry-run", "data.dev=nowhere.tsv"): "data.dev: nowhere.tsv does not exist",
        (f"data.dev={tmp_path}/wrong.tsv",): "wrong.tsv: 1 mistake\n  line 2: label is '7'; sst2 has 0, 1",
        ("model=nowhere",): "no export at nowhere",
        (f"model={run}",): f"it is a run, so export it first: launch/export.py --run {run} ",
        (f"model={tuned}",): f"it is a finetuning run, so give its export {tuned}/last",
        (f"output_dir={tmp_path}/file",): "(Not a directory); set output_dir to a folder that you may write to",
        ("train.device=cuda",): "train.device is cuda, but torch finds no CUDA device here",
    }.items():
        code, _, error = launch(*arguments)
        assert code == 2 and found in error
    for task in ("mnli", "sst2", "squad_v1", "squad_v2"):
        code, _, error = launch("--dry-run", config=RECIPES / f"{task}.yaml")
        assert code == 2 and "no export at exports/gmlp_base" in error
    assert launch("--seeds", "0")[0] == 2
    assert not (tmp_path / "outputs").exists()
