"""Ranks that cannot meet say why: another run's store, a port that is taken, a rank that does not come."""

import os
import re
import socket

from gmlp_scale.distributed.world import start_world
from gmlp_scale.errors import InputError, LostRankError
from tests.gloo_ranks import run_ranks


def _join(runs: list[str], timeout_seconds: float = 3) -> str:
    try:
        start_world(timeout_seconds, "cpu", run=runs[int(os.environ["RANK"])])
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


def _reach_nobody() -> str:
    os.environ |= {"WORLD_SIZE": "2", "RANK": "1"}
    return _join(["", "outputs/mine"], timeout_seconds=0.5)


def test_a_rank_that_does_not_reach_the_first_says_so():
    (error,) = run_ranks(_reach_nobody, 1)
    assert error.startswith("LostRankError: rank 1 did not reach the ranks' key-value store at 127.0.0.1:"), error
