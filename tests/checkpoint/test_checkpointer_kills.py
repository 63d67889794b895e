"""A real process killed at every event of a save, and one whose disk is full: what is on disk afterwards."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch

from gmlp_scale.checkpoint import checkpointer as checkpointer_module
from gmlp_scale.checkpoint import pieces
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.pieces import FileRecord
from gmlp_scale.checkpoint.stores import LocalCheckpoints, newest_checkpoint
from tests.checkpoint.fake_engine import DETAILS, FakeWorld, Shared, StepEngine, assert_holds_its_step, names_in
from tests.forked import fork

WORLD_SIZE = 2  # two ranks, on threads of one process: a kill takes the whole node


def save_step(checkpointers: list[Checkpointer], step: int, on_piece=lambda: None) -> None:
    for rank, checkpointer in enumerate(checkpointers):
        checkpointer.save(StepEngine(rank, len(checkpointers), step, on_piece), step)
    for checkpointer in checkpointers:
        checkpointer.wait()


class InTurnWorld(FakeWorld):
    def gather(self, value):
        return [value]

    def on_main(self, action):
        if self.rank == 0:
            self.shared.values = [action()]
        return self.shared.values[0]


def start_ranks(directory: Path, world_size: int = WORLD_SIZE) -> list[Checkpointer]:
    """Ranks that are called one after the other, rank 0 first."""
    config, shared = CheckpointConfig(save_every_steps=1, keep_last=2), Shared(1)
    worlds = [InTurnWorld(rank, world_size, shared) for rank in range(world_size)]
    place = LocalCheckpoints(directory)
    return [Checkpointer(place, config, world=world, details=DETAILS, timeout_seconds=20) for world in worlds]


class Killer:
    """Counts what a save does to the disk and kills this process just before event number `fatal_event`."""

    def __init__(self, log: Path, fatal_event: int):
        self.log, self.lock = log.open("a", buffering=1), threading.Lock()
        self.fatal_event, self.num_events = fatal_event, 0

    def event(self, *what) -> None:
        with self.lock:
            self.log.write(" ".join(Path(str(part)).name for part in what) + "\n")
            if self.num_events == self.fatal_event:
                os.kill(os.getpid(), signal.SIGKILL)
            self.num_events += 1

    def watch(self, name: str) -> None:
        real = getattr(os, name)

        def watched(*arguments, **options):
            self.event(name, *arguments)
            return real(*arguments, **options)

        setattr(os, name, watched)

    def write_safetensors(self, tensors, path) -> FileRecord:
        self.event("start of file", path)
        record = pieces.real_write_safetensors(tensors, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        self.event("half of file", path)
        path.write_bytes(whole)
        return record


def save_until_killed(directory: Path, log: Path, fatal_event: int) -> None:
    """Steps 1 and 2 undisturbed, then step 3, whose retention deletes step 1, with the kill."""
    torch.set_num_threads(1)
    checkpointer_module.POLL_SECONDS = 0.001
    pieces.FILE_BYTES = 1000
    checkpointers = start_ranks(directory)
    save_step(checkpointers, 1)
    save_step(checkpointers, 2)
    killer = Killer(log, fatal_event)
    pieces.real_write_safetensors = pieces.write_safetensors
    pieces.write_safetensors = killer.write_safetensors
    for name in ["mkdir", "rename", "replace", "unlink", "rmdir", "fsync"]:
        killer.watch(name)
    save_step(checkpointers, 3, on_piece=lambda: killer.event("stage"))


def run_in_child(function, *arguments) -> int:
    child = fork(function, *arguments)
    child.join(timeout=300)
    child.kill()  # only if it hangs
    child.join()
    return child.exitcode


def test_killed_at_every_event_of_a_save(tmp_path, monkeypatch, trials):
    monkeypatch.setattr(checkpointer_module, "POLL_SECONDS", 0.001)
    assert run_in_child(save_until_killed, tmp_path / "whole", tmp_path / "whole.log", -1) == 0
    events = (tmp_path / "whole.log").read_text().splitlines()
    phases = ["stage", "mkdir step_", "half of file rank_00001", "replace .DONE.", "rename step_000000003.tmp"]
    for phase in [*phases, "rename step_000000001 ", "rmdir step_000000001"]:
        assert any(event.startswith(phase) for event in events), phase

    newest_steps = []
    for fatal_event in range(len(events)):
        directory, log = tmp_path / f"{fatal_event}", tmp_path / f"{fatal_event}.log"
        assert run_in_child(save_until_killed, directory, log, fatal_event) == -signal.SIGKILL
        seen = log.read_text().splitlines()
        published = any(event.startswith("rename step_000000003.tmp") for event in seen[:-1])
        checkpoint, damaged = newest_checkpoint(directory)
        assert damaged == [], seen[-1]
        assert checkpoint.step == (3 if published else 2), seen[-1]
        assert_holds_its_step(checkpoint)
        newest_steps.append(checkpoint.step)

        checkpointers = start_ranks(directory)
        assert [checkpointer.newest().step for checkpointer in checkpointers] == [checkpoint.step] * WORLD_SIZE
        save_step(checkpointers, 4)
        left = names_in(directory)
        assert left == [f"step_00000000{checkpoint.step}", "step_000000004"], seen[-1]
        assert_holds_its_step(newest_checkpoint(directory)[0])
    assert {2, 3} == set(newest_steps)
    trials("killed within a save", len(events))


def save_on_a_full_disk(directory: Path) -> None:
    checkpointer = start_ranks(directory, world_size=1)[0]
    save_step([checkpointer], 1)
    checkpointer.world.is_stop_signalled = True  # so that nothing waits for room
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    checkpointer.save(StepEngine(0, 1, step=2), 2)
    with pytest.raises(CheckpointError, match=r"step_000000002 could not be saved: rank 0: .*File too large"):
        checkpointer.wait()
    assert names_in(directory) == ["step_000000001"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    checkpointer.save(StepEngine(0, 1, step=3), 3)
    with pytest.raises(CheckpointError, match=r"step_000000003 could not be saved: .*File too large"):
        checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert_holds_its_step(newest_checkpoint(directory)[0])
    save_step([checkpointer], 4)
    assert names_in(directory) == ["step_000000001", "step_000000004"]


def test_full_disk_leaves_earlier_checkpoints_and_the_run_goes_on(tmp_path, trials):
    assert run_in_child(save_on_a_full_disk, tmp_path) == 0
    for step in (1, 4):
        assert_holds_its_step(Checkpoint.open(tmp_path / f"step_00000000{step}"))
    trials("full disk during a save", 2)
