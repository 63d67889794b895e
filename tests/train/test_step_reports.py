"""A host that waits for a step's report learns that the step will never end, and hears signals.

The device is a stand-in, whose collective never ends; processes, signals and the ranks' store are real.
"""

import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.data.manifest import ShardError
from gmlp_scale.distributed import roll_call
from gmlp_scale.distributed.world import start_world
from gmlp_scale.errors import LostRankError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import run as run_module
from gmlp_scale.train.step_reports import StepReports
from tests.gloo_ranks import run_ranks
from tests.whole_runs import RECIPE, SMOKE

TIMEOUT_SECONDS = 600
"""Of the collectives: far longer than a test may take."""


def _wait(reports: StepReports, is_done=lambda: False) -> list[int]:
    """The steps whose reports are read once the device says so."""
    reports.world.note("the norm of step 7")
    values = torch.zeros(4 + 3 * reports.world.size, dtype=torch.float64)
    reports._sent.append((7, 0.1, values, SimpleNamespace(query=is_done)))
    return [report.step for report in reports.read(7)]


def _wait_in_step_7(one_does: str, which: int) -> str | None:
    if one_does == "is killed" and int(os.environ["RANK"]) == which and (child := os.fork()):
        os.waitpid(child, 0)
        return None
    world = start_world(TIMEOUT_SECONDS, "cpu")
    pids = world.gather(os.getpid())
    if world.rank == which:
        os.kill(os.getpid(), {"is killed": signal.SIGKILL, "stops": signal.SIGSTOP}[one_does])
        return None
    try:
        with world:
            _wait(StepReports(world, lambda: (0.0, 0.0), began=time.perf_counter()))
    except LostRankError as error:
        return str(error)
    finally:
        if one_does == "stops" and world.rank == world.size - 1:
            os.kill(pids[which], signal.SIGCONT)


@pytest.mark.parametrize("one_does", ["is killed", "stops"])
def test_a_rank_that_is_gone_is_named_while_the_others_wait_for_the_device(one_does, trials):
    first, _, third = run_ranks(_wait_in_step_7, 3, one_does, 1)
    assert re.match(r"rank 1 \(host \S+\) does not answer; rank 0 waited in the norm of step 7\. ", first), first
    # The store is rank 0's own here, and may have gone with it.
    assert "rank 1 (host" in third or re.match(r"rank 0 \(host \S+\) or its launcher", third)
    assert roll_call.SILENT_SECONDS + 2 * roll_call.POLL_SECONDS + roll_call.ANSWER_SECONDS < 15
    trials("SIGSTOP or end of a rank", 1)


@pytest.mark.parametrize("one_does", ["is killed", "stops"])
def test_the_rank_that_has_the_store_is_named(one_does):
    _, second = run_ranks(_wait_in_step_7, 2, one_does, 0)
    assert re.match(r"rank 0 \(host \S+\) or its launcher, which hold the ranks' key-value store, is gone", second)


def _train_beside_an_error(overrides: list[str]) -> str:
    def train(run, start_step):
        if run.world.rank == 1:
            raise ShardError("train-00001-000000.tar is corrupt")
        _wait(run.reports)

    run_module.train = train
    try:
        run_module.pretrain(load_run_config(SMOKE, [*RECIPE, *overrides]))
    except (ShardError, LostRankError) as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_one_rank_alone_is_what_the_others_end_with(forty_rows, tmp_path):
    timeout = f"engine.timeout_seconds={TIMEOUT_SECONDS}"
    overrides = ["engine.kind=fsdp2", timeout, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    first, second = run_ranks(_train_beside_an_error, 2, overrides)
    assert second == "ShardError: train-00001-000000.tar is corrupt"
    assert re.match(r"LostRankError: rank 1 \(host \S+\) failed: ShardError: train-\S+ is corrupt; rank 0 w", first)


def _wait_for_a_signal() -> list[int] | None:
    with start_world(TIMEOUT_SECONDS, "cpu") as world:
        pids = world.gather(os.getpid())
        if world.rank == 1:
            os.kill(pids[0], signal.SIGTERM)
            return None
        reports = StepReports(world, lambda: (0.0, 0.0), began=time.perf_counter())
        return _wait(reports, lambda: world.is_stop_signalled)


def test_a_stop_signal_is_heard_in_the_wait():
    assert run_ranks(_wait_for_a_signal, 2) == [[7], None]


def _wait_longer_than_a_rank_may_be_silent() -> list[int]:
    roll_call.SILENT_SECONDS = 3.0
    with start_world(TIMEOUT_SECONDS, "cpu") as world:
        reports = StepReports(world, lambda: (0.0, 0.0), began=time.perf_counter())
        beats_of_a_second = round(1 / roll_call.POLL_SECONDS)
        return _wait(reports, lambda: world.store.add(f"beat {1 - world.rank}", 0) > 5 * beats_of_a_second)


def test_a_step_may_take_long_while_all_ranks_run():
    assert run_ranks(_wait_longer_than_a_rank_may_be_silent, 2) == [[7], [7]]
