"""metrics.jsonl, its cut on resume, and the console line."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.engine import TrainConfig
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.tasks.evaluate import perplexity
from gmlp_scale.train.metrics import Metrics, StartUp, _duration, peak_tflops
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.step_reports import StepReport
from gmlp_scale.train.time_budget import build_schedule


def make_metrics(run_dir, world, start_step, *, tokens=512, **changes) -> Metrics:
    """Of a run whose steps have so many tokens; `changes` are of its `train` section."""
    train = TrainConfig(
        **{"num_steps": 100, "global_batch_size": 8, "micro_batch_size": 8, "log_every_steps": 100} | changes
    )
    task = SimpleNamespace(
        config=SimpleNamespace(run_dir=run_dir, fields=lambda: {"name": "smoke"}),
        train=train,
        tokens_per_step=Piecewise(tokens),
        flops_per_step=Piecewise(10**9),
        epochs=lambda step: {"data/epoch": step * 8 / 16},
    )
    schedule, loader = build_schedule(train, AdamwConfig(), {}), SimpleNamespace(wait_seconds=0.0)
    return Metrics(task, loader, schedule, world, start_step=start_step, start_up=StartUp(0.0))


def see(metrics: Metrics, step: int, loss: float = 2.0) -> None:
    metrics.see(StepReport(step, loss, norm=1.0, learning_rate=1e-3))


def log_step(metrics: Metrics, step: int, loss: float = 2.0) -> None:
    see(metrics, step, loss)
    metrics.log_rest()


def test_resume_cuts_the_file_after_the_checkpoint_and_drops_a_half_written_line(tmp_path, world):
    metrics = make_metrics(tmp_path, world, 0)
    for step in (10, 20, 30):
        log_step(metrics, step)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20, 30]
    metrics = make_metrics(tmp_path, world, 20)
    metrics.task.evaluate = lambda engine, world, step: {"eval/loss": 1.5}
    assert metrics.evaluate(None, 30)
    metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30]
    assert rows[2] == {"step": 30, "eval/loss": 1.5}


def test_what_a_line_says(tmp_path, world):
    metrics = make_metrics(tmp_path, world, 0, peak_tflops_per_device=2.0)
    metrics.checkpoint_stall_seconds = 0.25
    for step in (1, 2, 3):
        see(metrics, step, loss=1.0)
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


def test_speeds_count_the_tokens_of_each_step(tmp_path, world):
    batch_sizes = [[0, 8], [1, 16], [3, 32]]
    tokens = [(start, 64 * rows) for start, rows in batch_sizes]
    metrics = make_metrics(tmp_path, world, 0, tokens=tokens, global_batch_size=batch_sizes)
    log_step(metrics, 1)
    for step in (2, 3):
        see(metrics, step, loss=1.0)
    log_step(metrics, 4)
    metrics.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["data/samples_seen"], second["data/samples_seen"]) == (8, 8 + 16 + 16 + 32)
    seconds = 3 * second["perf/step_seconds"]
    assert second["perf/tokens_per_second"] * seconds == pytest.approx(64 * (16 + 16 + 32))


def test_mfu_is_left_out_where_the_peak_is_not_known(tmp_path, world):
    assert peak_tflops(torch.device("cpu"), "bf16") is None
    metrics = make_metrics(tmp_path, world, 0)
    log_step(metrics, 1)
    metrics.close()
    assert "perf/mfu" not in read_metrics(tmp_path / "metrics.jsonl")[0]


@pytest.mark.parametrize("seconds, text", [(0, "0s"), (59.6, "1m 0s"), (3700, "1h 1m"), (90_061, "1d 1h")])
def test_time_left_in_two_units(seconds, text):
    assert _duration(seconds) == text


def test_the_time_left_counts_the_evaluations_to_come_and_ends_where_this_start_stops(tmp_path, world):
    def seconds_left(step: int, **changes) -> float:
        metrics = make_metrics(tmp_path, world, 0, evaluate_every_steps=30, **changes)
        metrics.evaluation_seconds = 1000.0
        metrics.close()
        return metrics._seconds_left(StepReport(step, 1.0, 1.0, 1e-4, spent_seconds=500.0), step_seconds=1.0)

    assert seconds_left(29) == 71 + 4000  # after 30, 60, 90 and the last step
    assert seconds_left(29, time_budget_seconds=600.0) == 100
    assert seconds_left(30) == 70 + 4000  # the line of step 30 comes before its evaluation
    assert seconds_left(31) == 69 + 3000
    assert seconds_left(31, stop_after_step=60) == 29 + 1000
    assert seconds_left(31, num_steps=90) == 59 + 2000


def test_the_console_line_has_no_unknown_mfu_and_counts_to_the_stop(tmp_path, world, caplog):
    caplog.set_level(logging.INFO, "gmlp_scale")
    metrics = make_metrics(tmp_path, world, 0, stop_after_step=20)
    log_step(metrics, 1)
    metrics.close()
    assert "step 1/20  loss 2.0000" in caplog.text and "mfu" not in caplog.text
    metrics = make_metrics(tmp_path, world, 1, peak_tflops_per_device=2.0)
    log_step(metrics, 2)
    metrics.close()
    assert "step 2/100" in caplog.text and "  mfu " in caplog.text


def test_perplexity_does_not_overflow():
    assert perplexity(1000.0) == float("inf") and perplexity(0.0) == 1.0
