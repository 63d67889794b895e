"""metrics.jsonl, its cut on resume, and the console line."""

import json

import pytest
import torch

from gmlp_scale.train.evaluate import perplexity
from gmlp_scale.train.log_files import read_metrics
from gmlp_scale.train.metrics import Metrics, StartUp, _duration, peak_tflops
from gmlp_scale.train.step_reports import StepReport
from gmlp_scale.world import start_world


@pytest.fixture
def world():
    with start_world(timeout_seconds=10, device="cpu") as world:
        yield world


def make_metrics(run_dir, world, start_step, **changes) -> Metrics:
    sizes = {
        "num_steps": 100, "tokens_per_step": 512, "rows_per_step": 8, "rows_per_epoch": 16,
        "flops_per_step": 10**9, "peak_tflops_per_device": None,
    }  # fmt: skip
    return Metrics(run_dir, world, start_step=start_step, start_up=StartUp(0.0), **{**sizes, **changes})


def log_step(metrics: Metrics, step: int, loss: float = 2.0) -> None:
    report = StepReport(step, loss, norm=1.0, learning_rate=1e-3, own_loss=loss)
    metrics.see(report)
    metrics.log_training(report, data_wait_seconds=0.0)


def test_resume_cuts_the_file_after_the_checkpoint_and_drops_a_half_written_line(tmp_path, world):
    metrics = make_metrics(tmp_path, world, 0)
    for step in (10, 20, 30):
        log_step(metrics, step)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30]
    metrics = make_metrics(tmp_path, world, 20)
    metrics.log_evaluation(30, {"eval/loss": 1.5})
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[2] == {"step": 30, "eval/loss": 1.5}


def test_what_a_step_tells(tmp_path, world):
    metrics = make_metrics(tmp_path, world, 0, peak_tflops_per_device=2.0)
    metrics.checkpoint_stall_seconds = 0.25
    for step in (1, 2, 3):
        metrics.see(StepReport(step, loss=1.0, norm=1.0, learning_rate=1e-3, own_loss=1.0))
    log_step(metrics, 4, loss=5.0)
    log_step(metrics, 5)
    metrics.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert first["train/loss"] == 2.0 and first["train/perplexity"] == perplexity(2.0)
    assert second["train/loss"] == 2.0
    assert first["data/samples_seen"] == 32 and first["data/epoch"] == 2.0
    assert first["perf/tokens_per_second"] == pytest.approx(512 / first["perf/step_seconds"])
    assert first["perf/model_tflops_per_device"] == pytest.approx(1e-3 / first["perf/step_seconds"])
    assert first["perf/mfu"] == pytest.approx(first["perf/model_tflops_per_device"] / 2)
    assert (first["perf/checkpoint_stall_seconds"], second["perf/checkpoint_stall_seconds"]) == (0.25, 0.0)


def test_mfu_is_left_out_where_the_peak_is_not_known(tmp_path, world):
    assert peak_tflops(torch.device("cpu"), "bf16") is None
    metrics = make_metrics(tmp_path, world, 0)
    log_step(metrics, 1)
    metrics.close()
    assert "perf/mfu" not in read_metrics(tmp_path / "metrics.jsonl")[0]


@pytest.mark.parametrize("seconds, text", [(0, "0s"), (59.6, "1m 0s"), (3700, "1h 1m"), (90_061, "1d 1h")])
def test_time_left_in_two_units(seconds, text):
    assert _duration(seconds) == text


def test_perplexity_does_not_overflow():
    assert perplexity(1000.0) == float("inf") and perplexity(0.0) == 1.0
