"""The run folder outputs/<name>: claimed by one job at a time.

The kernel drops the lock when its process ends, however it ends, so no stale lock is left. The text of the file LOCK
only says whose it is. At a URL storage/claim.py has the claim, which a job rewrites to show that it is alive.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from gmlp_scale.errors import InputError, UserError
from gmlp_scale.storage.claim import ClaimedError, hold_folder
from gmlp_scale.storage.files import is_url


class RunFolderError(UserError):
    """Another job holds the run folder."""


@contextlib.contextmanager
def claimed(run_folder: str | Path) -> Iterator[Callable[[], bool]]:
    """Creates the run folder, a path or a URL, if needed and holds it for this process.

    Yields a function that tells whether it still does. A local folder to which nothing was written is removed again.

    Raises:
        RunFolderError: another process holds it, whose host and process are named.
        InputError: it cannot be created or locked.
    """
    if is_url(run_folder):
        try:
            with hold_folder(str(run_folder), f"{run_folder}/claims") as is_held:
                yield is_held
        except ClaimedError as error:
            raise RunFolderError(f"{error}, or give this run another name=...") from None
        return
    lock = Path(run_folder) / "LOCK"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        holder = lock.read_text(encoding="utf-8").strip() or "another process"
        needed = "wait for it, stop it, or give this run another name=..."
        raise RunFolderError(f"{run_folder} is in use by {holder}; {needed}") from None
    except OSError as error:
        needed = (
            "set output_dir to a folder that you may write to, on a filesystem with locks, which keep two jobs apart"
        )
        raise InputError(f"{lock} cannot be created or locked ({error.strerror}); {needed}") from None
    with held:
        lock.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
        try:
            yield lambda: True
        finally:
            with contextlib.suppress(OSError):  # the error of the run, if any, is what matters
                if list(lock.parent.iterdir()) == [lock]:
                    lock.unlink()
                    lock.parent.rmdir()
