"""Which rank holds the others up, found from what each times by itself: a step takes all of them equally long."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import stragglers
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.step_reports import StepReport
from gmlp_scale.train.stragglers import HeadClock, Stragglers, alone
from tests.gloo_ranks import run_ranks
from tests.whole_runs import RECIPE, SMOKE


def _train_with_a_slow_rank(overrides: list[str]) -> list[str]:
    """Every product of rank 1 takes three times as long, by a clock of its own. Returns this rank's warnings."""
    seconds_of_a_product = 3000.0 if os.environ["RANK"] == "1" else 1000.0
    clock, linear, lines = SimpleNamespace(now=0.0), nn.functional.linear, []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def timed_linear(*arguments) -> torch.Tensor:
        clock.now += seconds_of_a_product
        return linear(*arguments)

    logging.getLogger(stragglers.__name__).addHandler(Kept())
    stragglers.NUM_SLOW_STEPS = 4
    stragglers.time = SimpleNamespace(perf_counter=lambda: clock.now)
    nn.functional.linear = timed_linear
    pretrain(load_run_config(SMOKE, overrides))
    return lines


def test_a_slow_rank_is_named_though_all_ranks_need_equally_long(forty_rows, tmp_path):
    places = [f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    quiet = ["train.evaluate_every_steps=100", "checkpoint.save_every_steps=100", "train.num_evaluation_rows=2"]
    main, other = run_ranks(_train_with_a_slow_rank, 2, [*RECIPE, *places, *quiet, "engine.kind=fsdp2"])
    assert other == []
    (line,) = main
    assert line.startswith("rank 1 (host ") and "for 4 steps in a row" in line


@pytest.mark.parametrize(
    "compute, waits, step_seconds, expected",
    [
        ([1, 1, 2], [0, 0, 0], 0.4, [0.2, 0.2, 0.4]),
        ([1, 1, 1], [0, 0, 0.1], 0.3, [0.2, 0.2, 0.3]),
        ([1, 1, 2], [0, 0, 0.1], 0.5, [0.2, 0.2, 0.5]),
        ([1, 1], [0.3, 0.3], 0.3, [0.3, 0.3]),
        ([0, 0], [0, 0], 0.3, [0, 0]),
    ],
    ids=["computes slowly", "waits for batches", "both", "all wait", "no GPU has answered yet"],
)
def test_what_each_rank_alone_would_need(compute, waits, step_seconds, expected):
    assert alone(compute, waits, step_seconds) == pytest.approx(expected)


class Model(nn.Module):
    """Its forward pass takes 5 s up to the norm and then as long as asked, by a clock of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.now = nn.Identity(), 0.0

    def forward(self, seconds: float) -> None:
        self.now += 5.0
        self.norm(torch.zeros(()))
        self.now += seconds


def watched(world_size: int = 3) -> Stragglers:
    device, name_of = torch.device("cpu"), "rank {} (host node)".format
    world = SimpleNamespace(size=world_size, rank=0, is_main=True, device=device, name_of=name_of)
    return Stragglers(world, Model(), SimpleNamespace(wait_seconds=7.0))


def test_the_clock_times_the_end_of_the_newest_forward_pass(monkeypatch):
    model = Model()
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: model.now)
    clock, seen = HeadClock(model, torch.device("cpu")), []
    for seconds in (2.0, 3.0):
        seen += [clock.seconds(), clock.seconds()]
        model(seconds)
    assert [*seen, clock.seconds()] == [0.0, 0.0, 2.0, 2.0, 3.0]


def test_own_seconds_are_those_of_one_step():
    watch = watched()
    watch.loader.wait_seconds += 2.0
    assert watch.own_seconds() == (0.0, 2.0)
    assert watch.own_seconds() == (0.0, 0.0)


def test_a_rank_is_named_once_until_it_is_fast_again(caplog, monkeypatch):
    monkeypatch.setattr(stragglers, "NUM_SLOW_STEPS", 3)
    caplog.set_level(logging.WARNING, "gmlp_scale")
    watch = watched()
    watch._step_seconds = [0.3, 5.0]  # the second has an evaluation before it
    slow, fast = (0.1, 0.1, 0.16), (0.1, 0.1, 0.14)
    named = []
    for step, seconds in enumerate([slow, slow, fast, *[slow] * 7, fast, *[slow] * 3], start=1):
        watch.see(StepReport(step, 1.0, 1.0, 0.1, (), seconds, (0.0, 0.0, 0.0)))
        named += [step] * len(caplog.records)
        if caplog.records:
            assert "rank 2 (host node)" in caplog.text and f"at step {step} 1.6 times" in caplog.text
        caplog.clear()
    assert named == [6, 14]
