"""Ranks that cannot meet say why. A rank that is gone, stopped or elsewhere is named, with what others waited for."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from gmlp_scale.distributed import roll_call
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.errors import InputError, LostRankError
from tests.gloo_ranks import run_ranks


def _join(runs: list[str], timeout_seconds: float = 3) -> str:
    try:
        start_world(timeout_seconds, "cpu", init_group=True, run=runs[int(os.environ["RANK"])])
    except (InputError, LostRankError) as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_a_rank_of_another_run_is_refused_and_the_rank_that_did_not_come_is_named():
    first, stranger = run_ranks(_join, 2, ["outputs/mine", "s3://key:secret@bucket/yours"])
    assert re.fullmatch(
        r"InputError: the ranks' key-value store at 127\.0\.0\.1:\d+ belongs to the run outputs/mine, and this rank "
        r"1 to s3://\*\*\*@bucket/yours; give each job on a host its own MASTER_PORT",
        stranger,
    ), stranger
    assert first.startswith("LostRankError: rank 1 did not come within 3 s"), first


def _open_a_port_that_is_taken() -> str:
    os.environ["WORLD_SIZE"] = "2"
    with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        return _join(["outputs/mine"])


def test_a_port_of_another_job_is_an_error_that_says_so():
    (error,) = run_ranks(_open_a_port_that_is_taken, 1)
    assert re.match(r"InputError: the ranks' key-value store at 127\.0\.0\.1:\d+ cannot be opened \(.*in use", error)
    assert error.endswith("; give each job on a host its own MASTER_PORT")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_host_without_a_network_address_says_what_to_set(world_size, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    error = run_ranks(_join, world_size, [""] * world_size)[0]
    assert error.startswith("InputError: gloo finds no network address of this host (")
    assert "Unable to find address for: no_such_interface" in error and "set GLOO_SOCKET_IFNAME" in error


def _reach_nobody() -> str:
    os.environ |= {"WORLD_SIZE": "2", "RANK": "1"}
    return _join(["", "outputs/mine"], timeout_seconds=0.5)


def test_a_rank_that_does_not_reach_the_first_says_so():
    (error,) = run_ranks(_reach_nobody, 1)
    assert error.startswith("LostRankError: rank 1 did not reach the ranks' key-value store at 127.0.0.1:"), error


TIMEOUT_SECONDS = 3


def _wait_in_step_7(folder: Path, one_does: str, which: int = 1) -> str | None:
    world = start_world(TIMEOUT_SECONDS, "cpu")
    pids = world.gather(os.getpid())
    if world.rank == which:
        return {"leaves": _leave, "stops": _stop, "is late": _be_late}[one_does](world)
    try:
        with world, world.naming_lost_ranks():
            world.note("the norm of step 7")
            world.sum_on_device(torch.zeros(1))
    except LostRankError as error:
        return str(error)
    finally:
        (folder / str(world.rank)).touch()
        if one_does == "stops" and len(os.listdir(folder)) == world.size - 1:  # nobody asks it any more
            os.kill(pids[which], signal.SIGCONT)
    return "no error"


def _leave(world: World) -> None:
    """Its process ends without a word to the others."""


def _stop(world: World) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _be_late(world: World) -> None:
    world.note("the save of step 6")
    while not world._roll_call._answered_at:
        time.sleep(0.05)


@pytest.mark.parametrize("rank_one_does", ["leaves", "stops"])
def test_a_rank_that_does_not_answer_is_named(rank_one_does, tmp_path, trials):
    first, _, third = run_ranks(_wait_in_step_7, 3, tmp_path, rank_one_does)
    assert re.match(r"rank 1 \(host \S+\) does not answer; rank 0 waited in the norm of step 7\. ", first), first
    # The store is rank 0's own here, and may have gone with it.
    assert "rank 1 (host" in third or re.match(r"rank 0 \(host \S+\) or its launcher", third)
    trials("SIGSTOP or end of a rank", 1)


def test_the_rank_that_has_the_store_is_named_when_it_stands_still(tmp_path):
    """Its clients would wait for an answer without end."""
    _, second = run_ranks(_wait_in_step_7, 2, tmp_path, "stops", 0)
    host = socket.gethostname()
    wanted = f"rank 0 (host {host}) or its launcher, which hold the ranks' key-value store, is gone or cut off"
    assert second.startswith(f"{wanted} (and with host {host} perhaps rank 1); rank 1 waited in the norm of step 7. ")


def test_a_rank_that_answers_from_elsewhere_is_shown(tmp_path):
    first, *_ = run_ranks(_wait_in_step_7, 3, tmp_path, "is late")
    assert "all ranks answer" in first
    assert "rank 0 in the norm of step 7" in first and "rank 1 in the save of step 6" in first


class _SlowStore:
    """Takes its time for every answer."""

    def clone(self) -> "_SlowStore":
        return self

    def set(self, key: str, value: str) -> None:
        pass

    def add(self, key: str, value: int) -> int:
        return 1

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.3)
        return keys == ["present"]

    def get(self, key: str) -> bytes:
        return b"1 the save of step 6\n"


def test_a_slow_store_is_not_taken_for_one_that_is_gone(monkeypatch):
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 0.5)
    call = roll_call.RollCall(_SlowStore(), 0, ["a", "b", "c"])
    assert call.describe_missing() == "rank 2 (host c) does not answer; rank 0 waited in the start of the run"
    call.end()


def test_other_errors_pass(world):
    with pytest.raises(RuntimeError, match="of our own"), world.naming_lost_ranks():
        raise RuntimeError("of our own")
