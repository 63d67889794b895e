"""Checkpoints at a URL: whole or not there, on an S3 server that falters and however a save ends."""

import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest

from gmlp_scale.checkpoint import checkpointer as checkpointer_module
from gmlp_scale.checkpoint.format import CheckpointError
from gmlp_scale.checkpoint.stores import RemoteCheckpoints, newest_of
from gmlp_scale.errors import OtherRankError
from gmlp_scale.storage import files
from gmlp_scale.storage.claim import ClaimedError
from gmlp_scale.storage.files import list_files, read_file, write_file
from gmlp_scale.storage.run_folder import RemoteFolder
from tests.checkpoint.fake_engine import FakeEngine, FakeWorld, alone, assert_holds, checkpointer_on, names_in, on_ranks
from tests.forked import fork

URL = "s3://bucket/run/checkpoints"


@pytest.fixture
def memory():
    yield "memory://run/checkpoints"
    fsspec.filesystem("memory").rm("/run", recursive=True)


def copies(folder: Path, url: str = URL) -> RemoteCheckpoints:
    folder.mkdir(parents=True, exist_ok=True)
    return RemoteCheckpoints(url, folder)


def save_on_hosts(url: str, folder: Path, steps: list[int], world_size: int, *, num_hosts: int = 2, **options) -> None:
    """Each host has a staging folder of its own and as many ranks as the others."""

    def save_all(world: FakeWorld) -> None:
        host, world.local_rank = divmod(world.rank, world_size // num_hosts)
        checkpointer = checkpointer_on(copies(folder / f"host_{host}", url), world, **options)
        checkpoint = checkpointer.newest()
        if checkpoint:
            assert checkpoint.path.parent == folder / f"host_{host}"
            assert_holds(checkpoint, seed=checkpoint.step)
        for step in steps:
            checkpointer.save(FakeEngine(world.rank, world_size, seed=step), step)
        checkpointer.wait()
        checkpointer.close()

    on_ranks(world_size, save_all)
    if steps:
        assert [names_in(path) for path in folder.iterdir()] == [[]] * num_hosts, "nothing stays on the hosts' disks"


def test_ranks_of_several_hosts_save_and_resume_under_faults(s3, server, small_files, tmp_path, trials):
    server.fault_fraction, before = 0.1, server.faults
    save_on_hosts(URL, tmp_path / "first", [1, 2, 3], 4, keep_last=2)
    save_on_hosts(URL, tmp_path / "second", [4], 2, keep_last=2)
    assert server.faults > before + 5
    remote = copies(tmp_path / "copies")
    assert remote.names() == ["step_000000003", "step_000000004"]
    for step in (3, 4):
        assert_holds(remote.open(f"step_{step:09d}"), seed=step)
    assert {name.partition("/")[0] for name in list_files(URL)} == {"step_000000003", "step_000000004"}
    trials("S3: 10 % of answers 503, reset, cut or late", server.faults - before)


def save_step_3(url: str, folder: Path) -> None:
    checkpointer = alone(copies(folder, url), keep_last=2)
    checkpointer.newest()
    checkpointer.save(FakeEngine(seed=3), 3)
    checkpointer.wait()


def test_a_glance_copies_done_alone(memory, tmp_path):
    save_step_3(memory, tmp_path / "saving")
    glanced = copies(tmp_path / "copies", memory).open("step_000000003", verify_files=False)
    assert glanced.step == 3 and [path.name for path in glanced.path.iterdir()] == ["DONE"]


def kill_after(pid: int, requests: Iterator[int]) -> bool:
    if is_fatal := next(requests, None) is None:
        os.kill(pid, signal.SIGKILL)
    return not is_fatal


def test_killed_before_every_request_of_a_save(s3, server, tmp_path, trials):
    """Step 3 is saved beside 1 and 2, and step 1 is deleted."""
    save_on_hosts("s3://bucket/start", tmp_path / "start", [1, 2], 1, num_hosts=1)
    start = {name: read_file(f"s3://bucket/start/{name}") for name in list_files("s3://bucket/start")}
    newest_steps, exit_code = [], -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        place = tmp_path / f"{len(newest_steps)}"
        url = f"s3://bucket/{place.name}"
        for name, content in start.items():
            write_file(f"{url}/{name}", content)
        process = fork(save_step_3, url, place / "killed")
        server.before_change = partial(kill_after, process.pid, iter(range(len(newest_steps))))
        process.join(60)
        exit_code, server.before_change = process.exitcode, lambda: True

        remote = copies(place / "after", url)
        checkpoint, damaged = newest_of(remote)
        assert damaged == [] and checkpoint.step == (3 if f"step_{3:09d}/DONE" in list_files(url) else 2)
        assert_holds(checkpoint, seed=checkpoint.step)
        newest_steps.append(checkpoint.step)
        save_on_hosts(url, place / "resumed", [4], 1, num_hosts=1, keep_last=2)
        left = {name.partition("/")[0] for name in list_files(url)}
        assert left == {f"step_{checkpoint.step:09d}", "step_000000004"}
    assert exit_code == 0 and newest_steps == sorted(newest_steps) and newest_steps.count(2) >= 2
    assert newest_steps.count(3) >= 3, "killed in the deletion too"
    trials("killed within a save", len(newest_steps) - 1)


def test_a_save_that_the_store_refuses_is_tried_again(memory, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "_WAIT_SECONDS", ())
    monkeypatch.setattr(checkpointer_module, "RETRY_SECONDS", 0.01)
    store, num_failures = fsspec.filesystem("memory"), 3
    put_file = type(store).put_file

    def put_late(*arguments, **options):
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise ConnectionResetError("reset")
        return put_file(*arguments, **options)

    monkeypatch.setattr(type(store), "put_file", put_late)
    save_on_hosts(memory, tmp_path / "hosts", [1], 1, num_hosts=1)
    assert "could not be saved: rank 0" in caplog.text and f"see that {memory} can be written to" in caplog.text
    assert_holds(newest_of(copies(tmp_path / "copies", memory))[0], seed=1)


def test_a_store_keeps_those_of_keep_every_steps(memory, tmp_path):
    save_on_hosts(memory, tmp_path, [1, 2, 3, 4, 5], 1, num_hosts=1, keep_last=1, keep_every_steps=2)
    assert copies(tmp_path / "copies", memory).names() == [f"step_00000000{step}" for step in (2, 4, 5)]


@pytest.mark.parametrize("damage", ["flip", "cut", "lost"])
def test_a_damaged_checkpoint_is_passed_over_and_set_aside(memory, damage, tmp_path, caplog, trials):
    save_on_hosts(memory, tmp_path / "first", [1, 2], 2)
    file = f"{memory}/step_000000002/rank_00001_000.safetensors"
    content = bytearray(read_file(file))
    content[-1] ^= 1
    if damage == "lost":
        fsspec.filesystem("memory").rm_file("/run/checkpoints/step_000000002/rank_00001_000.safetensors")
    else:
        write_file(file, bytes(content if damage == "flip" else content[:-9]))
    with caplog.at_level(logging.WARNING, "gmlp_scale"):
        save_on_hosts(memory, tmp_path / "second", [], 2)
    assert "rank_00001_000.safetensors" in caplog.text and "Taking step_000000001 instead" in caplog.text
    remote = copies(tmp_path / "copies", memory)
    assert remote.names() == ["step_000000001"]
    assert any("step_000000002/DONE.damaged-" in name for name in list_files(memory))
    save_on_hosts(memory, tmp_path / "third", [2], 2)
    assert_holds(remote.open("step_000000002"), seed=2)
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 1)


def test_an_unreachable_store_is_no_damage(memory, tmp_path, monkeypatch):
    """Else a resumed run would go back, and set good checkpoints aside."""
    save_on_hosts(memory, tmp_path / "first", [1, 2], 1, num_hosts=1)
    monkeypatch.setattr(files, "_WAIT_SECONDS", ())

    def fail(*arguments, **options):
        raise ConnectionResetError("reset")

    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "get_file", fail)
        with pytest.raises(CheckpointError, match=r"step_000000002/.* failed 1 times, at last with ConnectionReset"):
            alone(copies(tmp_path / "second", memory)).newest()
    assert copies(tmp_path / "third", memory).names() == ["step_000000001", "step_000000002"]


def test_a_run_whose_folder_another_job_took_publishes_nothing_and_ends_at_the_next_save(quick, memory, tmp_path):
    url = memory.removesuffix("/checkpoints")
    folder = RemoteFolder(url, tmp_path / "local")
    with pytest.raises(ClaimedError, match=f"another job has taken {url} over"), folder.held():
        checkpointer = alone(RemoteCheckpoints(memory, folder.local / "checkpoints", folder))
        checkpointer.save(FakeEngine(seed=1), 1)
        checkpointer.wait()
        write_file(f"{url}/claims/000002.json", b"{}")  # as while this process stood still
        checkpointer.save(FakeEngine(seed=2), 2)
        checkpointer._settle()
        checkpointer.save(FakeEngine(seed=3), 3)
    assert RemoteCheckpoints(memory, tmp_path).names() == ["step_000000001"]
    assert "another job has taken" in checkpointer.last_error


def test_if_rank_0_has_lost_the_folder_every_rank_ends_at_the_save(tmp_path):
    url = "memory://lost"
    folder = RemoteFolder(url, tmp_path)
    folder._is_lost = True

    def save(world: FakeWorld) -> None:
        checkpointer = checkpointer_on(
            RemoteCheckpoints(f"{url}/checkpoints", tmp_path / f"of_{world.rank}", folder), world
        )
        with pytest.raises(ClaimedError if world.is_main else OtherRankError):
            checkpointer.save(FakeEngine(world.rank, 2), 1)

    on_ranks(2, save)
