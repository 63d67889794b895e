"""The run folder outputs/<name>: claimed by one job at a time, and resumed only by a run that continues it.

The claim is a lock that the kernel drops when the process ends however it ends, so nothing stale is ever left; the
file's text only says whose it is.
"""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path


class RunFolderError(RuntimeError):
    """The run folder belongs to another job, or to a run that this one does not continue."""


@contextlib.contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Holds the run folder (made if absent) for this process.

    Raises:
        RunFolderError: if another process holds it, naming its host and process.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "LOCK").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise RunFolderError(
                f"{run_dir} is in use by {lock.read().strip() or 'another process'}; "
                f"wait for it, stop it, or give this run another name=..."
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on host {socket.gethostname()}\n")
        lock.flush()
        yield


def write_text(path: Path, text: str) -> None:
    """Replaces a small file in one step: a reader sees the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def describe_data_change(before: dict, now: dict) -> list[str]:
    """One line for every entry in which two data fingerprints differ."""
    return [
        f"data {entry}: the checkpoint was trained on {before.get(entry)!r}; the run has {now.get(entry)!r}"
        for entry in sorted(before.keys() | now.keys())
        if before.get(entry) != now.get(entry)
    ]
