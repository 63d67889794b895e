"""A pool of processes that neither waits for a killed one nor outlives its job."""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import parent_process
from multiprocessing.context import BaseContext

from gmlp_scale.errors import UserError


@contextmanager
def pool_of_workers(num_workers: int, context: BaseContext) -> Iterator[ProcessPoolExecutor]:
    """multiprocessing's own pool waits for ever when a worker is killed; this one raises UserError in the body.

    The workers end when the job's own process does, so a killed job leaves nothing running.
    """
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, perhaps for want of memory (try fewer --workers); the same command again goes on "
            "with what is not done"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Print nothing, since the task's log and the error that the job prints say it all; end when the job ends."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def watch():
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
