"""What earlier code wrote still loads: a run goes on from its checkpoint, and an export is read."""

import os
import tarfile
from pathlib import Path

import pytest
import torch

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from tests.gloo_ranks import run_ranks

# What the code that wrote the checkpoint of step 4 logged when it went on from there. Other CPUs may round otherwise.
LOSSES = pytest.approx([5.706031799316406, 5.665925979614258, 5.705964088439941, 5.628322601318359], rel=1e-6)
NORMS = pytest.approx([1.0113818645477295, 1.0102308988571167, 0.9850161075592041, 1.052150011062622], rel=1e-6)
HELDOUT_LOSS = pytest.approx(5.68005599975586, rel=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """It has shards/, the run outputs/trunk, which stopped after step 4 of 8, and the run's export, export/."""
    folder = tmp_path_factory.mktemp("written_before")
    with tarfile.open(Path(__file__).parent / "written_before" / "run_and_export.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_a_checkpoint_and_an_export_are_read(folder):
    checkpoint = Checkpoint.open(folder / "outputs/trunk/checkpoints/step_000000004")
    losses = [[1, 5.67442512512207], [2, 5.651426792144775], [3, 5.682344436645508], [4, 5.652193069458008]]
    assert checkpoint.details["guard"]["recent_losses"] == losses, "DONE had them at the top"
    export = read_export(folder / "export")
    assert export.details["step"] == 4 and export.recipe.name == "trunk"
    assert all(torch.equal(checkpoint.read(f"model.{name}"), weight) for name, weight in export.weights.items())
    assert checkpoint.misfit(export.build()) == "" and export.tokenizer().vocab_size == 300


def test_a_run_goes_on_as_with_the_code_before(folder):
    run_ranks(_go_on, 1, folder)
    rows = read_metrics(folder / "outputs/trunk/metrics.jsonl")
    trained = [row for row in rows if "train/loss" in row and row["step"] > 4]
    assert [row["step"] for row in trained] == [5, 6, 7, 8]
    assert [row["train/loss"] for row in trained] == LOSSES
    assert [row["train/grad_norm"] for row in trained] == NORMS
    assert rows[-1]["eval/loss"] == HELDOUT_LOSS


def _go_on(folder: Path) -> None:
    os.chdir(folder)
    pretrain(load_run_config("outputs/trunk/config.yaml", ["output_dir=outputs", "train.stop_after_step=null"]))
