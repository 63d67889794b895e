"""Batches that worker processes make ahead: torch's DataLoader, made to fit how runs stop and fail."""

import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gmlp_scale.data.manifest import CorruptShardError
from gmlp_scale.distributed.process import STOP_SIGNALS
from gmlp_scale.errors import UserError

_FAILURES = (CorruptShardError, OSError)
"""A worker returns these errors as values, since the DataLoader would pass on the text alone of an error raised."""


class _Made(Dataset):
    """make(key) by key; an error of a shard or a store as a value."""

    def __init__(self, make: Callable[[Any], Any]):
        self._make = make

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._make(key)
        except _FAILURES as error:
            return error


def made_ahead(
    make: Callable[[Any], Any], keys: Iterable, *, num_workers: int, prefetch_batches: int
) -> Generator[Any, None, None]:
    """make(key) of each key, in order. Each worker makes `prefetch_batches` ahead; without workers, none is.

    Stop signals are for the run alone: workers go on until the iterator is closed or their parent is gone.
    Raises UserError if a worker is killed, and the error that `make` has with a shard or a store.
    """
    loader = DataLoader(
        _Made(make),
        sampler=keys,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,  # the workers share what is imported
        prefetch_factor=prefetch_batches if num_workers else None,
        worker_init_fn=_heed_parent_alone,
        generator=torch.Generator(),  # else the DataLoader would draw from the one that dropout uses
    )
    others, failure = active_children(), None
    with _our_signals():
        batches = iter(loader)
    workers = [child for child in active_children() if child not in others]
    try:
        for batch in batches:
            if isinstance(batch, _FAILURES):
                failure = batch
                break
            yield batch
    except Exception as error:
        # torch may raise before it knows why: the connection to a killed worker breaks first.
        ended = wait([worker.sentinel for worker in workers], timeout=1) if workers else []
        if not ended:
            raise
        (code, *_) = [worker.exitcode for worker in workers if worker.sentinel in ended]
        raise UserError(
            f"a process that decodes images ended with exit code {code}; -9 is a kill, mostly for want of memory. "
            "Lower data.num_workers (--workers of an evaluation) or data.prefetch_batches, or give the job more memory"
        ) from error
    if failure:
        del batches, loader  # the error's traceback would keep them, and so the workers
        raise failure


@contextmanager
def _our_signals() -> Iterator[None]:
    """Start workers within it: they inherit that stop signals are blocked, and torch's SIGCHLD handler is undone.

    That handler raises wherever the main thread is when a worker dies, even within a save. Without it torch notices the
    death when it waits for the worker, within 5 s.
    """
    on_child = signal.getsignal(signal.SIGCHLD)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if signal.getsignal(signal.SIGCHLD) != on_child:
            signal.signal(signal.SIGCHLD, on_child)


def _heed_parent_alone(worker: int) -> None:
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent sends SIGTERM, as it does to workers that are left when it exits."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)
