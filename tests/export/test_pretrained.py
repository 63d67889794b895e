"""launch/export.py on a real run."""

import sys
from pathlib import Path

import pytest
import torch

from gmlp_scale.data.tokenizer import train_tokenizer
from gmlp_scale.trained import read_export, read_run
from launch.export import main
from tests.forked import Script
from tests.written_shards import VOCAB_SIZE, add_tokenizer, write_tiny_shards

ROOT = Path(__file__).parents[2]
RECIPE = [
    "engine.kind=single", "model.num_blocks=2", "model.d_model=16", "model.d_ffn=32", "model.sequence_length=32",
    f"model.vocab_size={VOCAB_SIZE}", "train.num_steps=4", "train.global_batch_size=4", "train.micro_batch_size=4",
    "train.evaluate_every_steps=2", "train.num_evaluation_rows=4", "optimizer.warmup_steps=2",
    "checkpoint.save_every_steps=3",
]  # fmt: skip


@pytest.fixture
def export(monkeypatch, capsys):
    """export(options...) -> (exit code, what it printed, its error)."""

    def run(*options) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launch/export.py", *map(str, options)])
        code = main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run of 4 steps with checkpoints after steps 3 and 4, evaluated after 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    write_tiny_shards(folder / "shards", [16], [4], sequence_length=32)
    add_tokenizer(folder / "shards")
    places = [f"data.shards={folder / 'shards'}", f"output_dir={folder}", "name=tiny"]
    recipe = ROOT / "configs" / "pretrain" / "smoke.yaml"
    code, _, errors = Script("launch/pretrain.py", ["--config", recipe, *RECIPE, *places]).end()
    assert code == 0, errors
    return folder / "tiny"


@pytest.mark.parametrize(("step", "evaluated_step"), [(None, 4), (3, 2)])
def test_a_run_s_checkpoint_is_exported(run_dir, tmp_path, export, step, evaluated_step):
    choice = [] if step is None else ["--step", step]
    code, printed, error = export("--run", run_dir, "--output", tmp_path / "hf", *choice)
    assert (code, error) == (0, "")
    trained, written = read_run(run_dir, step), read_export(tmp_path / "hf")
    assert str(trained.place) in printed
    assert written.config == trained.config
    assert written.weights.keys() == trained.weights.keys()
    assert all(torch.equal(written.weights[name], weight) for name, weight in trained.weights.items())
    assert written.step == trained.step == (step or 4)
    assert written.details["heldout"]["step"] == evaluated_step
    assert written.details["data"] == trained.details["data"]
    assert written.details["config"]["train"]["num_steps"] == 4
    assert f"perplexity {written.details['heldout']['perplexity']:.3f}" in (tmp_path / "hf" / "README.md").read_text()


def test_user_errors_are_one_message(run_dir, tmp_path, export):
    for run, output, choice, message in (
        (tmp_path / "nowhere", tmp_path / "hf", [], f"no run at {tmp_path / 'nowhere'}: "),
        (run_dir, tmp_path / "hf", ["--step", 7], f"{run_dir} has no checkpoint of step 7; it has those of 3, 4"),
        (run_dir, run_dir, [], f"{run_dir} is there already"),
    ):
        code, printed, error = export("--run", run, "--output", output, *choice)
        assert (code, printed) == (2, "")
        assert message in error
    assert not (tmp_path / "hf").exists()


def test_another_tokenizer_beside_the_shards_is_refused(run_dir, tmp_path, export):
    place = run_dir.parent / "shards" / "tokenizer" / "tokenizer.model"
    own = place.read_bytes()
    train_tokenizer(["the cat and the dog went over the sea"] * 50, 275, place.parent)
    other = export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own[:-100])
    damaged = export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own)
    assert other[0] == damaged[0] == 2
    assert "is not the tokenizer that" in other[2]
    assert "tokenizer.model" in damaged[2]
