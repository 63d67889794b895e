"""Saving in the background: what holds the caller up, what fails, and on which ranks that is an error."""

import contextlib
import errno
import logging
import os
import resource
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.checkpoint import checkpointer as checkpointer_module
from gmlp_scale.checkpoint import pieces, stores
from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.distributed.world import start_world
from tests.checkpoint.fake_engine import (
    SHAPES,
    FakeEngine,
    FakeWorld,
    Shared,
    StepEngine,
    alone,
    assert_holds,
    assert_holds_its_step,
    checkpointer_on,
    names_in,
    on_ranks,
    save_steps,
)
from tests.gloo_ranks import run_ranks


def test_a_slow_disk_does_not_hold_up_the_caller_and_one_save_is_in_flight(tmp_path, monkeypatch):
    disk_is_back, real_fsync = threading.Event(), stores.fsync

    def stuck_fsync(path):
        assert disk_is_back.wait(timeout=60)
        real_fsync(path)

    monkeypatch.setattr(stores, "fsync", stuck_fsync)
    checkpointer, engine = alone(tmp_path), FakeEngine(seed=1)
    checkpointer.save(engine, 1)  # returns with the disk stuck
    for key, tensor in FakeEngine(seed=2).tensors.items():  # the next training step
        engine.tensors[key].copy_(tensor)
    second = threading.Thread(target=checkpointer.save, args=(engine, 2))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive() and engine.num_state_calls == 1  # waits, and leaves the staged copy alone
    disk_is_back.set()
    second.join()
    checkpointer.wait()
    for step in (1, 2):
        assert_holds(Checkpoint.open(tmp_path / f"step_00000000{step}"), seed=step)


def test_synchronous_save_is_complete_on_return(tmp_path, monkeypatch):
    checkpointer = alone(tmp_path, asynchronous=False)
    assert checkpointer.save(FakeEngine(seed=1), 1) > 0
    assert_holds(newest_checkpoint(tmp_path)[0], seed=1)
    monkeypatch.setattr(pieces, "write_safetensors", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.save(FakeEngine(seed=2), 2)
    assert newest_checkpoint(tmp_path)[0].step == 1


def full_disk(tensors, path):
    Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_one_ranks_full_disk_is_every_ranks_error_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    write_safetensors = pieces.write_safetensors

    def write_but_for_one(tensors, path):
        is_full = path.parent.name.startswith("step_000000002") and path.name.startswith("rank_00001")
        return (full_disk if is_full else write_safetensors)(tensors, path)

    monkeypatch.setattr(pieces, "write_safetensors", write_but_for_one)

    def run(world):
        checkpointer = checkpointer_on(tmp_path, world)
        checkpointer.save(FakeEngine(world.rank, 2, seed=1), 1)
        checkpointer.save(FakeEngine(world.rank, 2, seed=2), 2)
        world.is_stop_signalled = world.rank == 1  # so that nothing waits for room
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            checkpointer.wait()
        assert "No space left" in checkpointer.last_error
        assert names_in(tmp_path) == ["step_000000001"]
        world.gather(0)
        checkpointer.save(FakeEngine(world.rank, 2, seed=3), 3)
        checkpointer.wait()
        assert checkpointer.last_error is None

    with caplog.at_level(logging.ERROR, "gmlp_scale"):
        on_ranks(2, run)
    assert "step_000000002 could not be saved: rank 1" in caplog.text
    for step in (1, 3):
        assert_holds(Checkpoint.open(tmp_path / f"step_00000000{step}"), seed=step)


def test_a_save_that_waited_for_the_one_before_has_its_own_time(tmp_path, monkeypatch):
    real_write = pieces.write_safetensors

    def slow_write(tensors, path):
        time.sleep(2 if path.name.startswith("rank_00001") else 0)
        return real_write(tensors, path)

    def run(world):
        checkpointer = checkpointer_on(tmp_path, world, timeout_seconds=3.5, keep_last=9)
        for step in (1, 2):
            checkpointer.save(FakeEngine(world.rank, 2, seed=step), step)
        checkpointer.wait()

    monkeypatch.setattr(pieces, "write_safetensors", slow_write)
    on_ranks(2, run)
    assert names_in(tmp_path) == ["step_000000001", "step_000000002"]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_saved(tmp_path, wrong):
    checkpointer, engine = alone(tmp_path), FakeEngine(seed=1)
    engine.tensors["model.blocks.0.weight"][2, 1, 1] = wrong
    checkpointer.save(engine, 1)
    with pytest.raises(CheckpointError, match=r"model\.blocks\.0\.weight is not finite, so training has diverged"):
        checkpointer.wait()
    assert names_in(tmp_path) == []


def test_a_failed_save_is_forgotten_once_one_succeeds(tmp_path, monkeypatch):
    checkpointer = alone(tmp_path, waits_for_room=False)
    with monkeypatch.context() as patched:
        patched.setattr(pieces, "write_safetensors", full_disk)
        checkpointer.save(FakeEngine(seed=1), 1)
        checkpointer._settle()
        assert "No space left" in checkpointer.last_error
    checkpointer.save(FakeEngine(seed=2), 2)
    checkpointer.wait()
    assert checkpointer.last_error is None
    assert_holds(newest_checkpoint(tmp_path)[0], seed=2)


@pytest.mark.parametrize("ended_by", ["timeout", "close", "loss"])
def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch, ended_by):
    """`close` gives it time to come, but none once it is known to be lost."""
    monkeypatch.setattr(checkpointer_module, "CLOSE_GRACE_SECONDS", 1000.0 if ended_by == "loss" else 0.2)
    timeout_seconds = 0.2 if ended_by == "timeout" else 600.0
    checkpointer = checkpointer_on(tmp_path, FakeWorld(0, 3), timeout_seconds=timeout_seconds)
    checkpointer.save(FakeEngine(0, 3), 1)
    checkpointer.world.has_lost_ranks = ended_by == "loss"
    if ended_by != "timeout":
        checkpointer.close()
    with pytest.raises(CheckpointError, match=r"nothing came in time from ranks \[1, 2\]"):
        checkpointer.wait()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("on_full_disk, left", [("keep", [1, 2]), ("drop_oldest", [2, 3])])
def test_the_oldest_goes_first_on_a_full_disk_if_it_may(tmp_path, monkeypatch, on_full_disk, left):
    real_write = pieces.write_safetensors

    def write_two_checkpoints_only(tensors, path):
        folders = [folder for folder in tmp_path.iterdir() if any(folder.iterdir())]
        return (full_disk if len(folders) >= 2 else real_write)(tensors, path)

    monkeypatch.setattr(pieces, "write_safetensors", write_two_checkpoints_only)
    checkpointer = alone(tmp_path, on_full_disk=on_full_disk)
    for step in (1, 2, 3):
        checkpointer.save(FakeEngine(seed=step), step)
    checkpointer.world.is_stop_signalled = True  # so that nothing waits for room
    with contextlib.nullcontext() if 3 in left else pytest.raises(CheckpointError, match="No space left"):
        checkpointer.wait()
    assert names_in(tmp_path) == [f"step_00000000{step}" for step in left]
    assert_holds(newest_checkpoint(tmp_path)[0], seed=left[-1])


@pytest.mark.parametrize("keep_every_steps, left", [(None, [7, 10]), (3, [3, 6, 7, 10])])
def test_the_newest_stay_and_those_of_keep_every_steps_for_good(tmp_path, keep_every_steps, left):
    save_steps(tmp_path, [1, 2, 3, 4, 6, 7, 10], keep_last=2, keep_every_steps=keep_every_steps)
    assert names_in(tmp_path) == [f"step_{step:09d}" for step in left]
    assert_holds(Checkpoint.open(tmp_path / f"step_{left[0]:09d}"), seed=left[0])


def test_a_full_disk_takes_none_that_stays_for_good(tmp_path, monkeypatch):
    save_steps(tmp_path, [2, 3, 4], keep_every_steps=2)
    monkeypatch.setattr(pieces, "write_safetensors", full_disk)
    checkpointer = alone(tmp_path, keep_every_steps=2, on_full_disk="drop_oldest", waits_for_room=False)
    checkpointer.save(FakeEngine(seed=5), 5)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.wait()
    assert names_in(tmp_path) == ["step_000000002", "step_000000004"]


def test_a_listing_that_is_late_holds_no_save_up(tmp_path, monkeypatch):
    """NFS may list a folder as it was half a minute ago. Before, rank 0 found the receipts by a listing."""
    monkeypatch.setattr(os, "listdir", lambda path: [])
    save_steps(tmp_path, [1], world_size=2, timeout_seconds=5)
    assert_holds(newest_checkpoint(tmp_path)[0], seed=1)


def test_close_does_not_wait_for_a_store_that_stands_still(tmp_path, monkeypatch):
    """Its process may have been stopped: a client then waits without end, whatever its timeout."""
    monkeypatch.setattr(checkpointer_module, "CLOSE_GRACE_SECONDS", 0.1)
    world, asks = FakeWorld(1, 2, Shared(2)), threading.Event()
    world.gather = lambda value: [value]
    world.store = SimpleNamespace(
        set=lambda key, value: None, check=lambda keys: asks.set() or threading.Event().wait()
    )
    checkpointer = checkpointer_on(tmp_path, world)
    checkpointer.save(FakeEngine(1, 2), 1)
    assert asks.wait(timeout=60)
    checkpointer.close()


def test_staging_buffers_hold_a_copy_and_are_used_again():
    buffers, addresses = {}, []
    for step in (1, 2):
        engine = FakeEngine(seed=step)
        copied = pieces.staged(engine, buffers)
        assert copied.keys() == SHAPES.keys()
        for key, piece in copied.items():
            assert torch.equal(piece.tensor, engine.tensors[key]) and piece.shape == SHAPES[key]
            assert piece.tensor.data_ptr() != engine.tensors[key].data_ptr()
        addresses.append({key: piece.tensor.data_ptr() for key, piece in copied.items()})
    assert addresses[0] == addresses[1]


def test_details_that_are_not_json_fail_at_once(tmp_path):
    for details, error in [({"path": Path("x")}, TypeError), ({"loss": float("nan")}, ValueError)]:
        with pytest.raises(error):
            alone(tmp_path, details=details)
    assert names_in(tmp_path) == []


TIMEOUT_SECONDS = 300.0  # nothing of what follows may come near it


def set_file_limit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def _save_with_one_full_disk(directory: Path) -> None:
    with start_world(TIMEOUT_SECONDS, "cpu") as world:
        saver = checkpointer_on(directory, world)
        saver.save(StepEngine(world.rank, 2, 1), 1)
        saver.wait()

        # 1. No room on rank 1: training goes on, and the same step is saved once there is room.
        checkpointer_module.RETRY_SECONDS = 0.2
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
        checkpointer_module.RETRY_SECONDS = TIMEOUT_SECONDS
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
    saver = checkpointer_on(directory, world, asynchronous=world.rank == 1)
    if world.rank == 1:
        stores.write_pieces = lambda folder, rank, pieces: threading.Event().wait()
        saver.save(StepEngine(1, 2, 1), 1)
        return None  # and the process ends
    checkpointer_module.CLOSE_GRACE_SECONDS = 0.2
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection"):
        saver.save(StepEngine(0, 2, 1), 1)
    saver.close()
    return time.monotonic() - started


def test_a_rank_that_dies_in_a_synchronous_save_is_noticed_at_once(tmp_path, trials):
    assert run_ranks(_lose_rank_1_in_a_save, 2, tmp_path, timeout_seconds=90)[0] < 60
    assert names_in(tmp_path) == []
    trials("killed within a save", 1)
