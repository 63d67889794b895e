"""launch/export.py on a real run."""

import pytest
import torch

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.data.tokenizer import train_tokenizer


@pytest.mark.parametrize(("step", "evaluated_step"), [(None, 4), (3, 2)])
def test_a_run_s_checkpoint_is_exported(run_dir, tmp_path, launched_export, step, evaluated_step):
    choice = [] if step is None else ["--step", step]
    code, printed, error = launched_export("--run", run_dir, "--output", tmp_path / "hf", *choice)
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
    perplexity = f"{written.details['heldout']['perplexity']:.3f}"
    shown = f"perplexity {perplexity} (" if step is None else f"not measured at this step; {perplexity} at step 2 ("
    assert shown in (tmp_path / "hf" / "README.md").read_text()


def test_user_errors_are_one_message(run_dir, tmp_path, launched_export):
    for run, output, choice, message in (
        (tmp_path / "nowhere", tmp_path / "hf", [], f"no run at {tmp_path / 'nowhere'}: "),
        (
            run_dir,
            tmp_path / "hf",
            ["--step", 7],
            f"{run_dir}/checkpoints has no checkpoint of step 7; it has those of 3, 4",
        ),
        (run_dir, run_dir, [], f"{run_dir} is there already"),
    ):
        code, printed, error = launched_export("--run", run, "--output", output, *choice)
        assert (code, printed) == (2, "")
        assert message in error
    assert not (tmp_path / "hf").exists()


def test_another_tokenizer_beside_the_shards_is_refused(run_dir, tmp_path, launched_export):
    place = run_dir.parent / "shards" / "tokenizer" / "tokenizer.model"
    own = place.read_bytes()
    train_tokenizer(["the cat and the dog went over the sea"] * 50, 275, place.parent)
    other = launched_export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own[:-100])
    damaged = launched_export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own)
    assert other[0] == damaged[0] == 2
    assert "is not the tokenizer that" in other[2]
    assert "tokenizer.model" in damaged[2]
