"""The run folder outputs/<name>: claimed by one job at a time.

The kernel drops the lock when its process ends, however it ends, so no stale lock is left. The text of the file LOCK
only says whose it is.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class RunFolderError(RuntimeError):
    """Another job holds the run folder."""


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Creates the run folder if needed and holds it for this process.

    Raises:
        RunFolderError: another process holds it, whose host and process are named; or the filesystem cannot lock.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = run_dir / "LOCK"
    try:
        held = FileLock(lock, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        holder = lock.read_text(encoding="utf-8").strip() or "another process"
        needed = "wait for it, stop it, or give this run another name=..."
        raise RunFolderError(f"{run_dir} is in use by {holder}; {needed}") from None
    except OSError as error:
        needed = "set output_dir to a filesystem with locks, which keep two jobs from writing to one run"
        raise RunFolderError(f"{lock} cannot be locked ({error.strerror}); {needed}") from None
    with held:
        lock.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
        yield
