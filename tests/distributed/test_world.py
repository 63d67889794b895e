"""What the ranks of a World exchange, and how a World starts and ends."""

import contextlib
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from gmlp_scale.distributed import logs
from gmlp_scale.distributed.world import start_world
from gmlp_scale.errors import OtherRankError
from launch import pretrain
from tests.gloo_ranks import run_ranks


def _agree() -> dict:
    with start_world(30, "cpu") as world:
        return {
            "sum": world.sum([world.rank + 0.5, 1.0]),
            "sum_on_device": world.sum_on_device(torch.tensor([world.rank + 0.5, 1.0])).tolist(),
            "gather": world.gather({"from": world.rank, "text": "é" * 100 * world.rank}),
            "on_main": world.on_main(lambda: f"of rank {world.rank}"),
            "size": (world.rank, world.size, world.is_main, world.device),
        }


def test_all_ranks_get_the_same_values():
    for rank, result in enumerate(run_ranks(_agree, 3)):
        assert result["sum"] == result["sum_on_device"] == [0.5 + 1.5 + 2.5, 3.0]
        assert result["gather"] == [{"from": other, "text": "é" * 100 * other} for other in range(3)]
        assert result["on_main"] == "of rank 0"
        assert result["size"] == (rank, 3, rank == 0, torch.device("cpu"))


def _traces(folder: Path) -> str:
    os.environ.pop("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", None)  # of a run that this process was forked after
    with start_world(30, "cpu", traces_in=folder):
        return os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]


def test_the_flight_recorder_dumps_into_the_runs_folder(tmp_path):
    assert run_ranks(_traces, 2, tmp_path) == [f"{tmp_path}/nccl_trace_rank_"] * 2


def _main_fails() -> str:
    with start_world(30, "cpu") as world:
        done = []
        world.on_main(lambda: done.append(world.rank))
        assert done == ([0] if world.is_main else [])
        try:
            world.on_main(_refuse)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def _refuse() -> None:
    raise FileExistsError("another run holds the folder")


def test_what_fails_on_the_main_rank_fails_on_all():
    main, other = run_ranks(_main_fails, 2)
    assert main == "FileExistsError: another run holds the folder"
    assert re.fullmatch(r"OtherRankError: rank 0 \(host .*\) could not go on; the message there says why", other)


def _other_fails() -> str:
    with start_world(30, "cpu") as world:
        assert world.on_all(lambda: world.rank + 1) == [1, 2]
        with pytest.raises(FileExistsError if world.rank == 1 else OtherRankError) as caught:
            world.on_all(_refuse if world.rank == 1 else int)
        return str(caught.value)


def test_what_fails_on_one_rank_is_named_on_all():
    main, other = run_ranks(_other_fails, 2)
    assert other == "another run holds the folder"
    assert re.fullmatch(r"rank 1 \(host .*\) could not go on; the message there says why", main)


def _one_rank_fails() -> str:
    try:
        with start_world(600, "cpu") as world:
            world.sum_on_device(torch.zeros(1))
            if world.is_main:
                raise KeyError("something broke")
            world.barrier()
    except KeyError:
        return "KeyError"
    except RuntimeError:  # of the store or of the barrier, whichever meets the loss first
        return "RuntimeError"


def _start_again_after_an_error() -> float:
    with contextlib.suppress(ZeroDivisionError), start_world(30, "cpu", init_group=True):
        raise ZeroDivisionError
    with start_world(30, "cpu", init_group=True) as world:
        return world.sum([0.5])[0]


def test_an_error_ends_the_process_group_of_a_single_process():
    assert run_ranks(_start_again_after_an_error, 1) == [0.5]


def test_a_rank_that_fails_leaves_at_once_and_the_others_notice():
    # Well within the timeout of the collectives.
    assert run_ranks(_one_rank_fails, 2, timeout_seconds=300) == ["KeyError", "RuntimeError"]


def _wait_for_nobody(timeout_seconds: float) -> float | None:
    world = start_world(timeout_seconds, "cpu")
    store = torch.distributed.distributed_c10d._get_default_store()
    if world.rank == 1:  # there, but not at the barrier
        with contextlib.suppress(RuntimeError):  # rank 0 may be gone before its answer is here
            store.wait(["done"], timedelta(seconds=120))
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        world.barrier()
    waited = time.monotonic() - start
    store.set("done", "")
    return waited


def test_a_collective_raises_after_the_timeout():
    waited = run_ranks(_wait_for_nobody, 2, 2.0)[0]
    assert 1.5 < waited < 60  # far from the default of half an hour, also on a busy machine


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name
)
def test_one_process_needs_no_launcher(monkeypatch, number):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(number)
    with start_world(30, "cpu") as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        assert world.sum([2.5]) == [2.5]
        assert world.gather(3) == [3]
        assert world.on_main(lambda: "x") == "x"
        world.barrier()
        assert world.sum_on_device(torch.ones(2)).tolist() == [1.0, 1.0]
        assert not world.is_stop_signalled
        os.kill(os.getpid(), number)
        assert world.is_stop_signalled
    os.kill(os.getpid(), signal.SIGTERM)  # heard still, as the process is to end
    signal.signal(number, before)
    with start_world(30, "cpu"):
        assert signal.getsignal(number) != before
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "variables, mistakes",
    [
        ("WORLD_SIZE=2", ["RANK: found '", "LOCAL_RANK: found '", "MASTER_PORT: found '", "MASTER_ADDR: found '"]),
        ("WORLD_SIZE=2 RANK=2 LOCAL_RANK=0 MASTER_PORT=x MASTER_ADDR=h", ["RANK: found '2'", "MASTER_PORT: found 'x'"]),
        ("WORLD_SIZE=", ["WORLD_SIZE: found ''; needed: a number from 1 to"]),
        ("WORLD_SIZE=0", ["WORLD_SIZE: found '0'"]),
        ("WORLD_SIZE=-2", ["WORLD_SIZE: found '-2'"]),
        ("WORLD_SIZE=2.0", ["WORLD_SIZE: found '2.0'"]),
        ("WORLD_SIZE=²", ["WORLD_SIZE: found '²'"]),
        ("WORLD_SIZE=" + "9" * 5000, ["WORLD_SIZE: found '99"]),
        ("WORLD_SIZE=2 RANK=x LOCAL_RANK=-1 MASTER_PORT=0 MASTER_ADDR=h", ["RANK: ", "LOCAL_RANK: ", "MASTER_PORT: "]),
        ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=2 MASTER_PORT=65536 MASTER_ADDR=h", ["LOCAL_RANK: ", "MASTER_PORT: "]),
        ("RANK=3", ["RANK: found '3'; needed: a number from 0 to 0"]),
        ("LOCAL_RANK=one", ["LOCAL_RANK: found 'one'; needed: a number from 0 to 0"]),
    ],
    ids=range(12),
)
def test_variables_that_no_launcher_sets_are_refused_before_anything_starts(variables, mistakes, monkeypatch, refuses):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(logs, "OTHERS_REPORT_AFTER_SECONDS", 0.0)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))
    error = refuses(mistakes[0], pretrain.main, "--config", "smoke")
    first, *found, last = [line.strip() for line in error.splitlines()]
    assert first == "the launcher's variables cannot be used" and last.startswith(
        "start the processes with torchrun or"
    )
    assert len(found) == len(mistakes)
    for line, mistake in zip(sorted(found), sorted(mistakes), strict=True):
        assert line.startswith(mistake)
