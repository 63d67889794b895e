"""What all ranks learn of a step, read at once (CPU) or a step late (GPU)."""

import os
import signal

import pytest
import torch

from gmlp_scale.distributed.world import start_world
from gmlp_scale.train.step_reports import StepReports
from tests.gloo_ranks import run_ranks


def _stop_steps(lag: int) -> list[tuple[int, int, float]]:
    """(step when read, its step, its loss) of each report until one says to stop; rank 1 is signalled during step 3."""
    with start_world(30, "cpu") as world:
        reports, step = StepReports(world, lambda: (step + world.rank, 0.5 * world.rank), began=0.0), 0
        reports.lag, seen = lag, []
        reports.spent_seconds = lambda: 10.1 * step + world.rank
        while not reports.is_stop:
            step += 1
            if step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = torch.tensor(float(step + world.rank))
            reports.send(step, loss, loss.square(), 0.1 * step)
            for report in reports.read(until_step=step - lag):
                assert report.losses == (report.step, report.step + 1)
                assert report.compute_seconds == (report.step, report.step + 1) and report.wait_seconds == (0, 0.5)
                assert report.spent_seconds == 10.1 * report.step, "by rank 0's clock, to the last bit"
                seen.append((step, report.step, report.loss))
    return seen


@pytest.mark.parametrize("lag", [0, 2])
def test_all_ranks_stop_at_the_same_step_with_all_reports_read(lag):
    first, second = run_ranks(_stop_steps, 2, lag)
    assert first == second
    leaving = 3 + lag
    read_in_time = [(step + lag, step, step + 0.5) for step in range(1, 4)]
    assert first == read_in_time + [(leaving, step, step + 0.5) for step in range(4, leaving + 1)]


@pytest.mark.parametrize("loss, norm", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_report_knows_that_it_is_not_finite(monkeypatch, loss, norm):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with start_world(30, "cpu") as world:
        reports = StepReports(world, lambda: (0.0, 0.0), began=0.0)
        reports.send(7, torch.tensor(loss), torch.tensor(norm), 0.5)
        (report,) = reports.read(until_step=7)
    assert (report.step, report.learning_rate, report.is_finite, reports.is_stop) == (7, 0.5, False, False)
