"""The run folder outputs/<name>: claimed by one job at a time, and resumed only by a run that continues it.

The kernel drops the lock when its process ends, however it ends, so no stale one is ever left. HOLDER only says whose
it is.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class RunFolderError(RuntimeError):
    """The run folder belongs to another job, or to a run that this one does not continue."""


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Holds the run folder (made if absent) for this process.

    Raises:
        RunFolderError: another process holds it; its host and process are named.
        OSError, NotImplementedError: the filesystem cannot lock.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    holder = run_dir / "HOLDER"
    try:
        with FileLock(run_dir / "LOCK", blocking=False):
            holder.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
            yield
    except Timeout:
        found = holder.read_text(encoding="utf-8").strip() if holder.exists() else "another process"
        raise RunFolderError(
            f"{run_dir} is in use by {found}; wait for it, stop it, or give this run another name=..."
        ) from None


def describe_data_change(before: dict, now: dict) -> list[str]:
    """One line for every entry in which two data fingerprints differ."""
    return [
        f"data {entry}: the checkpoint was trained on {before.get(entry)!r}; the run has {now.get(entry)!r}"
        for entry in sorted(before.keys() | now.keys())
        if before.get(entry) != now.get(entry)
    ]
