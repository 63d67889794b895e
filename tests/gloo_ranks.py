"""Runs a test's function on real processes that talk over gloo, as a launcher would start them."""

import multiprocessing
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forked import fork


def run_ranks(function: Callable, world_size: int, *arguments: Any, timeout_seconds: float = 400) -> list[Any]:
    """Calls function(*arguments) in `world_size` processes with a launcher's variables; returns the results by rank.

    `function` must be importable (at the top of a module), and results picklable. A rank that raises, hangs or does
    not end with exit code 0 fails the test with that rank's traceback; the others are then killed.
    """
    # Plain pickle: multiprocessing's own would pass tensors through shared memory, which ends with its process.
    call = pickle.dumps((function, arguments))
    receivers, senders = zip(*[multiprocessing.Pipe(duplex=False) for _ in range(world_size)], strict=True)
    ranks = [
        fork(_send_result, sender, call, environment=variables)
        for sender, variables in zip(senders, rank_variables(world_size), strict=True)
    ]
    for sender in senders:
        sender.close()
    deadline = time.monotonic() + timeout_seconds
    try:
        results = _collect(receivers, deadline)
        for rank, process in enumerate(ranks):
            process.join(max(0, deadline - time.monotonic()))
            assert process.exitcode == 0, f"rank {rank} of {world_size} ended with {process.exitcode} (None: it hangs)"
        return results
    finally:
        for process in ranks:
            process.kill()
            process.join()


def rank_variables(world_size: int) -> list[dict[str, str]]:
    """The environment variables that a launcher gives each rank; a port on this host that is free now."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
        missing = sorted(set(range(len(pipes))) - results.keys())
        assert ready, f"ranks {missing} of {len(pipes)} did not finish in time"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(pipes)} died without a word") from None
            assert error is None, f"rank {rank} of {len(pipes)} failed:\n{error}"
    return [results[rank] for rank in range(len(pipes))]


def _send_result(sender: Connection, call: bytes) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        function, arguments = pickle.loads(call)
        sender.send_bytes(pickle.dumps((None, function(*arguments))))
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        sys.exit(1)
