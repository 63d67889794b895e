"""Saving and loading: any world size to any other, in the background, and what each kind of damage leads to."""

import errno
import json
import logging
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gmlp_scale.train import checkpoint as checkpoint_module
from gmlp_scale.train import checkpointer as checkpointer_module
from gmlp_scale.train.checkpoint import Checkpoint, CheckpointError, newest_checkpoint
from gmlp_scale.train.checkpointer import CheckpointConfig, Checkpointer

SHAPES = {
    "model.embedding.weight": (7, 3),
    "model.blocks.0.norm.bias": (5,),
    "model.blocks.0.weight": (4, 3, 2),
    "model.temperature": (),
    "optimizer.embedding.weight.exp_avg": (7, 3),
}


class Piece(NamedTuple):
    tensor: Tensor
    shape: tuple[int, ...]
    first_row: int


class FakeEngine:
    """Owns rows of a few tensors as FSDP2 splits them: equal chunks, the last short or empty. Rank 0 has scalars."""

    def __init__(self, rank: int = 0, world_size: int = 1, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
        self.rank, self.world_size = rank, world_size
        self.num_state_calls = 0

    def owned_rows(self, key: str) -> tuple[int, int]:
        num_rows = SHAPES[key][0]
        chunk = -(-num_rows // self.world_size)
        return min(self.rank * chunk, num_rows), min((self.rank + 1) * chunk, num_rows)

    def state(self):
        self.num_state_calls += 1
        for key, tensor in self.tensors.items():
            if tensor.ndim:
                first_row, stop_row = self.owned_rows(key)
                yield key, Piece(tensor[first_row:stop_row], SHAPES[key], first_row)
            elif self.rank == 0:
                yield key, Piece(tensor, (), 0)

    def load_state(self, read, step: int) -> None:
        self.step = step
        for key, tensor in self.tensors.items():
            if tensor.ndim:
                first_row, stop_row = self.owned_rows(key)
                self.tensors[key] = torch.full(SHAPES[key], torch.nan)
                self.tensors[key][first_row:stop_row] = read(key, first_row, stop_row)
            else:
                self.tensors[key] = read(key, 0, None)


def on_ranks(world_size: int, function):
    """Call function(rank, broadcast) on one thread per rank and return the ranks' results."""
    barrier, shared = threading.Barrier(world_size, timeout=30), [None]

    def call(rank: int):
        def broadcast(value):
            if rank == 0:
                shared[0] = json.dumps(value)
            barrier.wait()
            received = json.loads(shared[0])
            barrier.wait()
            return received

        return function(rank, broadcast)

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(world_size)]]


def save_steps(directory: Path, steps: list[int], world_size: int = 1, keep_last: int = 9, asynchronous: bool = True):
    """Save the state of seed `step` as each of `steps`."""

    def save_all(rank, broadcast):
        config = CheckpointConfig(save_every_steps=1, keep_last=keep_last, asynchronous=asynchronous)
        checkpointer = Checkpointer(directory, config, rank=rank, world_size=world_size, broadcast=broadcast)
        for step in steps:
            checkpointer.save(FakeEngine(rank, world_size, seed=step), step, {"name": f"run {step}"})
        checkpointer.wait()
        checkpointer.close()

    on_ranks(world_size, save_all)


def alone(directory: Path, keep_last: int = 9, asynchronous: bool = True) -> Checkpointer:
    config = CheckpointConfig(save_every_steps=1, keep_last=keep_last, asynchronous=asynchronous)
    return Checkpointer(directory, config, rank=0, world_size=1, broadcast=lambda value: value)


def assert_holds(checkpoint: Checkpoint, seed: int) -> None:
    expected = FakeEngine(seed=seed).tensors
    assert set(checkpoint.keys) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read(key), tensor), key


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(checkpointer_module, "FILE_BYTES", 50)


# --- round trips


def test_moves_between_world_sizes_2_3_1(tmp_path, small_files):
    engines = [FakeEngine(rank, 2, seed=8) for rank in range(2)]
    for step, world_size, next_world_size in [(10, 2, 3), (20, 3, 1), (30, 1, 5)]:

        def save(rank, broadcast, step=step, world_size=world_size, engines=engines):
            config = CheckpointConfig(save_every_steps=10)
            checkpointer = Checkpointer(tmp_path, config, rank=rank, world_size=world_size, broadcast=broadcast)
            checkpointer.save(engines[rank], step, {"seed": 8})
            checkpointer.wait()

        def load(rank, broadcast, world_size=next_world_size):
            config = CheckpointConfig(save_every_steps=10)
            checkpointer = Checkpointer(tmp_path, config, rank=rank, world_size=world_size, broadcast=broadcast)
            engine = FakeEngine(rank, world_size, seed=1)
            checkpointer.newest().load_into(engine)
            return engine

        on_ranks(world_size, save)
        engines = on_ranks(next_world_size, load)
        assert {engine.step for engine in engines} == {step}
        assert_holds(newest_checkpoint(tmp_path)[0], seed=8)
        assert len(list((tmp_path / f"step_{step:09d}").glob("rank_00000_*"))) > 1


def test_files_are_plain_safetensors_and_json(tmp_path):
    save_steps(tmp_path, [12000], world_size=2)
    folder = tmp_path / "step_000012000"
    assert names_in(folder) == ["DONE", "rank_00000_000.safetensors", "rank_00001_000.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one file may read all
    done = json.loads((folder / "DONE").read_text())
    assert (done["step"], done["format_version"], done["details"]) == (12000, 1, {"name": "run 12000"})
    assert done["tensors"]["model.embedding.weight"] == {
        "shape": [7, 3],
        "pieces": [["rank_00000_000.safetensors", 0, 4], ["rank_00001_000.safetensors", 4, 3]],
    }
    second = load_file(folder / "rank_00001_000.safetensors")
    assert torch.equal(second["model.embedding.weight"], FakeEngine(seed=12000).tensors["model.embedding.weight"][4:])


def test_reads_any_rows(tmp_path):
    save_steps(tmp_path, [1], world_size=3)
    checkpoint, whole = newest_checkpoint(tmp_path)[0], FakeEngine(seed=1).tensors["model.embedding.weight"]
    for first_row in range(8):
        for stop_row in range(first_row, 8):
            rows = checkpoint.read("model.embedding.weight", first_row, stop_row)
            assert torch.equal(rows, whole[first_row:stop_row])
    checkpoint.read("model.embedding.weight").zero_()  # its own memory: the file stays as it is
    assert_holds(Checkpoint.open(checkpoint.path), seed=1)


def test_a_wrong_read_says_what_is_there(tmp_path):
    save_steps(tmp_path, [1])
    checkpoint = newest_checkpoint(tmp_path)[0]
    with pytest.raises(CheckpointError, match=r"no 'model.embedding.weigth'.*nearest: .*'model.embedding.weight'"):
        checkpoint.read("model.embedding.weigth")
    for rows in [(0, 8), (-1, 2), (5, 4)]:
        with pytest.raises(CheckpointError, match=rf"\(7, 3\), not its rows {rows[0]} to {rows[1]}"):
            checkpoint.read("model.embedding.weight", *rows)


def test_pieces_that_leave_a_hole_or_overlap_are_not_saved(tmp_path):
    for wrong_rows in [slice(0, 6), slice(1, 7)]:
        engine = FakeEngine()
        piece = Piece(engine.tensors["model.embedding.weight"][wrong_rows], (7, 3), wrong_rows.start)
        engine.state = lambda piece=piece: iter([("model.embedding.weight", piece)])
        checkpointer = alone(tmp_path)
        checkpointer.save(engine, 1, {})
        with pytest.raises(CheckpointError, match=r"model\.embedding\.weight: .* do not hold each row once"):
            checkpointer.wait()
        assert names_in(tmp_path) == []


# --- in the background


def test_a_slow_disk_does_not_hold_up_the_caller_and_one_save_is_in_flight(tmp_path, monkeypatch):
    disk_is_back, real_fsync = threading.Event(), checkpointer_module._fsync

    def stuck_fsync(path):
        assert disk_is_back.wait(timeout=60)
        real_fsync(path)

    monkeypatch.setattr(checkpointer_module, "_fsync", stuck_fsync)
    checkpointer, engine = alone(tmp_path), FakeEngine(seed=1)
    checkpointer.save(engine, 1, {})  # returns with the disk stuck
    for key, tensor in FakeEngine(seed=2).tensors.items():  # the next training step
        engine.tensors[key].copy_(tensor)
    second = threading.Thread(target=checkpointer.save, args=(engine, 2, {}))
    second.start()
    second.join(timeout=0.3)
    assert second.is_alive() and engine.num_state_calls == 1  # waits, and leaves the staged copy alone
    disk_is_back.set()
    second.join()
    checkpointer.wait()
    for step in (1, 2):
        assert_holds(Checkpoint.open(tmp_path / f"step_00000000{step}"), seed=step)


def test_staging_buffers_are_used_again(tmp_path):
    checkpointer, addresses = alone(tmp_path), []
    for step in (1, 2):
        checkpointer.save(FakeEngine(seed=step), step, {})
        addresses.append({key: buffer.data_ptr() for key, buffer in checkpointer._buffers.items()})
    checkpointer.wait()
    assert addresses[0] == addresses[1] and addresses[0].keys() == SHAPES.keys()


def test_synchronous_save_is_complete_on_return(tmp_path, monkeypatch):
    checkpointer = alone(tmp_path, asynchronous=False)
    assert checkpointer.save(FakeEngine(seed=1), 1, {}) > 0
    assert_holds(newest_checkpoint(tmp_path)[0], seed=1)
    monkeypatch.setattr(checkpointer_module, "save_file", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.save(FakeEngine(seed=2), 2, {})
    assert newest_checkpoint(tmp_path)[0].step == 1


def full_disk(tensors, path):
    Path(path).write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_one_ranks_full_disk_is_every_ranks_error_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    save_file = checkpointer_module.save_file

    def save_file_but_for_one(tensors, path):
        is_full = path.parent.name.startswith("step_000000002") and path.name.startswith("rank_00001")
        (full_disk if is_full else save_file)(tensors, path)

    monkeypatch.setattr(checkpointer_module, "save_file", save_file_but_for_one)

    def run(rank, broadcast):
        config = CheckpointConfig(save_every_steps=1)
        checkpointer = Checkpointer(tmp_path, config, rank=rank, world_size=2, broadcast=broadcast)
        checkpointer.save(FakeEngine(rank, 2, seed=1), 1, {})
        checkpointer.save(FakeEngine(rank, 2, seed=2), 2, {})
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            checkpointer.wait()
        assert "No space left" in checkpointer.last_error
        assert names_in(tmp_path) == ["step_000000001"]
        broadcast(None)
        checkpointer.save(FakeEngine(rank, 2, seed=3), 3, {})
        checkpointer.wait()
        assert checkpointer.last_error is None

    with caplog.at_level(logging.ERROR, "gmlp_scale"):
        on_ranks(2, run)
    assert "step_000000002 could not be saved: rank 1" in caplog.text
    for step in (1, 3):
        assert_holds(Checkpoint.open(tmp_path / f"step_00000000{step}"), seed=step)


def test_a_failed_save_is_forgotten_once_one_succeeds(tmp_path, monkeypatch):
    checkpointer = alone(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpointer_module, "save_file", full_disk)
        checkpointer.save(FakeEngine(seed=1), 1, {})
        checkpointer._join()
        assert "No space left" in checkpointer.last_error
    checkpointer.save(FakeEngine(seed=2), 2, {})
    checkpointer.wait()
    assert checkpointer.last_error is None
    assert_holds(newest_checkpoint(tmp_path)[0], seed=2)


@pytest.mark.parametrize("ended_by", ["timeout", "close"])
def test_a_rank_that_never_comes_is_named(tmp_path, monkeypatch, ended_by):
    monkeypatch.setattr(checkpointer_module, "CLOSE_GRACE_SECONDS", 0.2)
    checkpointer = Checkpointer(
        tmp_path,
        CheckpointConfig(save_every_steps=1),
        rank=0,
        world_size=3,
        broadcast=lambda value: value,
        timeout_seconds=0.2 if ended_by == "timeout" else 600.0,
    )
    checkpointer.save(FakeEngine(0, 3), 1, {})
    if ended_by == "close":
        checkpointer.close()
    with pytest.raises(CheckpointError, match=r"nothing came in time from ranks \[1, 2\]"):
        checkpointer.wait()
    assert names_in(tmp_path) == []


def test_details_that_are_no_json_fail_at_the_call(tmp_path):
    checkpointer = alone(tmp_path)
    for details, error in [({"path": Path("x")}, TypeError), ({"loss": float("nan")}, ValueError)]:
        with pytest.raises(error):
            checkpointer.save(FakeEngine(), 1, details)
    assert names_in(tmp_path) == []


# --- which one is taken


def test_nothing_there_is_none(tmp_path):
    assert alone(tmp_path).newest() is None
    assert newest_checkpoint(tmp_path / "no such folder") == (None, [])


def test_keeps_the_newest_and_only_them(tmp_path):
    save_steps(tmp_path, [1, 2, 3, 10], keep_last=2)
    assert names_in(tmp_path) == ["step_000000003", "step_000000010"]


def test_leftovers_of_a_dead_run_go_at_the_start_and_nothing_else(tmp_path):
    save_steps(tmp_path, [1])
    for name in [
        "step_000000002.tmp-0123abcd",
        "step_000000003.tmp-deleted",
        "step_000000004.damaged-0123abcd",
        "mine",
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert newest_checkpoint(tmp_path)[0].step == 1
    assert len(names_in(tmp_path)) == 5  # looking changes nothing
    alone(tmp_path)
    assert names_in(tmp_path) == ["mine", "step_000000001", "step_000000004.damaged-0123abcd"]


def test_a_step_saved_or_resumed_from_is_not_saved_again(tmp_path):
    checkpointer, engine = alone(tmp_path), FakeEngine(seed=5)
    checkpointer.save(engine, 5, {})
    assert checkpointer.save(engine, 5, {}) == 0.0
    checkpointer.wait()
    resumed = alone(tmp_path)
    assert resumed.newest().step == 5
    assert resumed.save(engine, 5, {}) == 0.0
    assert engine.num_state_calls == 1


def test_after_a_fallback_the_damaged_step_is_set_aside_and_written_anew(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000002" / "rank_00000_000.safetensors").write_bytes(b"")

    def resume(rank, broadcast):
        config = CheckpointConfig(save_every_steps=1)
        checkpointer = Checkpointer(tmp_path, config, rank=rank, world_size=2, broadcast=broadcast)
        assert checkpointer.newest().step == 1
        checkpointer.save(FakeEngine(rank, 2, seed=7), 2, {})
        checkpointer.wait()

    on_ranks(2, resume)
    assert_holds(newest_checkpoint(tmp_path)[0], seed=7)
    first, second, damaged = names_in(tmp_path)
    assert (first, second) == ("step_000000001", "step_000000002") and damaged.startswith("step_000000002.damaged-")


def test_never_writes_over_a_checkpoint_that_is_there(tmp_path):
    save_steps(tmp_path, [3])
    careless = alone(tmp_path)  # did not ask for the newest first
    careless.save(FakeEngine(seed=4), 3, {})
    with pytest.raises(CheckpointError, match=r"not empty.*step_000000003"):
        careless.wait()
    assert names_in(tmp_path) == ["step_000000003"]
    assert_holds(newest_checkpoint(tmp_path)[0], seed=3)


def test_all_damaged_is_an_error_on_every_rank_that_names_each(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000001" / "DONE").unlink()
    (tmp_path / "step_000000002" / "rank_00000_000.safetensors").unlink()

    def find(rank, broadcast):
        config = CheckpointConfig(save_every_steps=1)
        with pytest.raises(CheckpointError) as raised:
            Checkpointer(tmp_path, config, rank=rank, world_size=2, broadcast=broadcast).newest()
        return str(raised.value)

    for message in on_ranks(2, find):
        assert "step_000000001 has no DONE" in message
        assert "step_000000002: rank_00000_000.safetensors: No such file" in message
    assert names_in(tmp_path) == ["step_000000001", "step_000000002"]


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path):
    save_steps(tmp_path, [1, 2])
    (tmp_path / "step_000000001").rename(tmp_path / "step_000000009")
    assert newest_checkpoint(tmp_path)[0].step == 2


# --- damage


def test_300_damages_are_all_found_and_the_checkpoint_before_is_taken(tmp_path, small_files, caplog):
    save_steps(tmp_path, [1, 2], world_size=2)
    draw, newest = random.Random(0), tmp_path / "step_000000002"
    files = sorted(newest.iterdir())
    assert len(files) > 4
    for trial in range(300):
        path = files[trial % len(files)]
        good = path.read_bytes()
        header_bytes = 8 + int.from_bytes(good[:8], "little") if path.suffix else len(good) - 80
        regions = [
            (0, 8),
            (8, header_bytes),
            (header_bytes, len(good)),
        ]  # length, header, data; DONE: start, body, seal
        position = draw.randrange(*regions[trial // len(files) % 3])
        bad = bytearray(good)
        kind = draw.choice(["flip", "zero", "truncate", "append"])
        if kind == "truncate":
            del bad[position:]
        elif kind == "append":
            bad += bytes(1)
        elif kind == "zero" and bad[position]:
            bad[position] = 0
        else:
            bad[position] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gmlp_scale"):
            taken, damaged = newest_checkpoint(tmp_path)
        assert (taken.step, damaged) == (1, [newest]), (path.name, kind, position)
        (warning,) = caplog.messages
        assert "step_000000002" in warning and "step_000000001" in warning
        assert path.name in warning
        path.write_bytes(good)
    assert newest_checkpoint(tmp_path)[0].step == 2


class Malicious:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary,)


def reseal(folder: Path, change) -> None:
    """What an attacker who can write DONE would do."""
    done = json.loads((folder / "DONE").read_text())
    del done["sha256"]
    change(done)
    (folder / "DONE").write_text(checkpoint_module.sealed(json.dumps(done)))


def test_a_pickle_is_never_run(tmp_path):
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(Malicious(canary)))
    assert canary.exists()  # it would
    canary.unlink()

    save_steps(tmp_path, [1])
    folder, payload = tmp_path / "step_000000001", pickle.dumps(Malicious(canary))
    file = folder / "rank_00000_000.safetensors"
    file.write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"rank_00000_000\.safetensors has"):
        Checkpoint.open(folder)
    record = {"bytes": len(payload), "sha256": checkpoint_module.file_sha256(file)}
    reseal(folder, lambda done: done["files"].update({file.name: record}))
    with pytest.raises(SafetensorError):
        Checkpoint.open(folder).read("model.temperature")
    (folder / "DONE").write_bytes(payload)
    with pytest.raises(CheckpointError, match="DONE cannot be used"):
        Checkpoint.open(folder)
    assert not canary.exists()


def test_a_done_from_elsewhere_cannot_name_files_outside_or_another_format(tmp_path):
    save_steps(tmp_path, [1])
    folder = tmp_path / "step_000000001"
    reseal(folder, lambda done: done["files"].update({"../secret": {"bytes": 1, "sha256": ""}}))
    with pytest.raises(CheckpointError, match=r"names files that no checkpoint has.*\.\./secret"):
        Checkpoint.open(folder)
    reseal(folder, lambda done: done.update(format_version=2))
    with pytest.raises(CheckpointError, match="format_version"):
        Checkpoint.open(folder)
