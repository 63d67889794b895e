"""Saves of real processes over gloo: one whose disk is full, and one that dies in the middle."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest

from gmlp_scale.checkpoint import checkpointer, stores
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.distributed.world import World, start_world
from tests.checkpoint.fake_engine import StepEngine, assert_holds_its_step, checkpointer_on, names_in
from tests.gloo_ranks import run_ranks

TIMEOUT_SECONDS = 300.0  # nothing here may come near it


def start_checkpointer(directory: Path, world: World, **config) -> Checkpointer:
    return checkpointer_on(directory, world, timeout_seconds=TIMEOUT_SECONDS, **config)


def set_file_limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _save_with_one_full_disk(directory: Path) -> None:
    with start_world(TIMEOUT_SECONDS, "cpu") as world:
        saver = start_checkpointer(directory, world)
        saver.save(StepEngine(world.rank, 2, 1), 1)
        saver.wait()

        # 1. No room on rank 1: training goes on, and the same step is saved once there is room.
        checkpointer.RETRY_SECONDS = 0.2
        if world.rank == 1:
            set_file_limit(1000)
        saver.save(StepEngine(world.rank, 2, 2), 2)
        while not any(world.gather(int(saver.last_error is not None))):
            assert world.sum([1.0]) == [2.0]  # a training step
        assert names_in(directory)[0] == "step_000000001"
        set_file_limit(resource.RLIM_INFINITY)
        saver.wait()
        assert saver.last_error is None
        assert_holds_its_step(Checkpoint.open(directory / "step_000000002"))

        # 2. No room at the end: the run waits for it, and a stop signal to either rank ends the wait on both.
        checkpointer.RETRY_SECONDS = TIMEOUT_SECONDS
        if world.rank == 1:
            set_file_limit(1000)
        saver.save(StepEngine(world.rank, 2, 3), 3)

        def signal_after_failure():
            while saver.last_error is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)

        if world.rank == 1:
            threading.Thread(target=signal_after_failure).start()
        with pytest.raises(CheckpointError, match=r"step_000000003 could not be saved: rank 1: .*File too large"):
            saver.wait()
        world.barrier()
        assert names_in(directory) == ["step_000000001", "step_000000002"]

        # 3. The same step may be saved later all the same, though the store remembers the attempts before.
        set_file_limit(resource.RLIM_INFINITY)
        saver.save(StepEngine(world.rank, 2, 3), 3)
        saver.wait()
        assert_holds_its_step(Checkpoint.open(directory / "step_000000003"))
        saver.close()


def test_a_full_disk_of_one_rank_is_reported_at_once_and_waited_for(tmp_path, trials):
    run_ranks(_save_with_one_full_disk, 2, tmp_path, timeout_seconds=90)
    trials("full disk during a save", 1)


def _lose_rank_1_in_a_save(directory: Path) -> float | None:
    world = start_world(TIMEOUT_SECONDS, "cpu")
    saver = start_checkpointer(directory, world, asynchronous=world.rank == 1)
    if world.rank == 1:
        stores.write_pieces = lambda folder, rank, pieces: threading.Event().wait()
        saver.save(StepEngine(1, 2, 1), 1)
        return None  # and the process ends
    checkpointer.CLOSE_GRACE_SECONDS = 0.2
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection"):
        saver.save(StepEngine(0, 2, 1), 1)
    saver.close()
    return time.monotonic() - started


def test_a_rank_that_dies_in_a_synchronous_save_is_noticed_at_once(tmp_path, trials):
    assert run_ranks(_lose_rank_1_in_a_save, 2, tmp_path, timeout_seconds=90)[0] < 60
    assert names_in(tmp_path) == []
    trials("killed within a save", 1)
