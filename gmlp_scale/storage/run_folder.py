"""The run folder outputs/<name>: held by one job at a time, and copied where it is at a URL.

A local folder is locked. The kernel drops the lock when its process ends, however it ends, so no stale lock is left.
The text of the file LOCK only says whose it is. At a URL storage/claim.py has the claim, which a job rewrites to show
that it is alive.
"""

import logging
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gmlp_scale.errors import InputError
from gmlp_scale.storage.claim import ClaimedError, hold_folder, repeating
from gmlp_scale.storage.files import download_file, list_files, upload_file

log = logging.getLogger(__name__)

PUSH_EVERY_SECONDS = 5.0
_NOT_WHOLE = (".new", ".old")
"""Ends of the names of folders that are about to be renamed or deleted."""


@contextmanager
def claimed(run_folder: str | Path) -> Iterator[None]:
    """Creates a local run folder if needed and holds it for this process. If nothing was written to it, it is removed
    again.

    Raises:
        ClaimedError: another process holds it, whose host and process are named.
        InputError: it cannot be created or locked.
    """
    lock = Path(run_folder) / "LOCK"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        for path in lock.parent.iterdir():
            if path.exists() and not path.is_file() and not path.is_dir():
                raise InputError(f"{path} is a pipe or a device, which a run would wait for: move it away")
        held = FileLock(lock, fallback_to_soft=False).acquire(blocking=False)
    except Timeout:
        holder = lock.read_text(encoding="utf-8").strip() or "another process"
        needed = "wait for it, stop it, or give this run another name=..."
        raise ClaimedError(f"{run_folder} is in use by {holder}; {needed}") from None
    except OSError as error:
        needed = "a folder that you may write to, on a filesystem with locks, which keep two jobs apart"
        raise InputError(f"{lock} cannot be created or locked ({error.strerror}); set output_dir to {needed}") from None
    with held:
        lock.write_text(f"process {os.getpid()} on host {socket.gethostname()}\n", encoding="utf-8")
        try:
            yield
        finally:
            with suppress(OSError):  # the error of the run, if any, is what matters
                if list(lock.parent.iterdir()) == [lock]:
                    lock.unlink()
                    lock.parent.rmdir()


class RemoteFolder:
    """A run folder at a URL, such as s3://bucket/runs/gmlp_base, that a run works on in local folders.

    Every host has a local folder. What rank 0's host has in it, metrics and TensorBoard's files above all, is copied to
    the URL every few seconds. Checkpoints have their own way there: gmlp_scale/checkpoint/stores.py.

    Args:
        local: the run's while it holds the claim. What an earlier run left there is deleted.
    """

    def __init__(self, url: str, local: Path):
        self.url, self.local = url, local
        self._pushed: dict[str, tuple[int, int]] = {}
        self._is_pushing, self._is_failing, self._is_lost = threading.Lock(), False, False

    @contextmanager
    def held(self) -> Iterator[None]:
        """For rank 0: holds the folder for this process, and copies to it what changes in `local`.

        Raises:
            ClaimedError: another process holds the folder.
            OSError: the last files cannot be copied. They stay in `local`. After a body that failed it is a warning.
        """
        with ExitStack() as stack:
            try:
                self._is_held = stack.enter_context(hold_folder(self.url, f"{self.url}/claims"))
            except ClaimedError as error:
                raise ClaimedError(f"{error}, or give this run another name=...") from None
            stack.enter_context(self.local_folder())
            try:
                with repeating(self._try_push, PUSH_EVERY_SECONDS):
                    yield
            except BaseException:
                self._try_push()
                raise
            try:
                self._push()
            except OSError as error:
                where = f"The files are in {self.local}: copy them; the next start deletes them"
                raise OSError(f"{error}. {where}") from error

    @contextmanager
    def local_folder(self) -> Iterator[None]:
        """For a rank of another host: `local` begins with the run folder's own files, such as the record of corrupt
        shards, not those of its subfolders. Only this user can read it. It stays if the body fails."""
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True, mode=0o700)
        for name in list_files(self.url):
            if "/" not in name:
                download_file(f"{self.url}/{name}", self.local / name)
                self._pushed[name] = _state(self.local / name)
        yield
        shutil.rmtree(self.local, ignore_errors=True)

    def before_publish(self) -> None:
        """To call before a checkpoint is published: only the job that holds the folder may, after all metrics up to
        its step."""
        self._look_at_claim()
        self._try_push()

    def check_claim(self) -> None:
        """Raises ClaimedError once another job was seen to hold the folder. Asks the store nothing."""
        if self._is_lost:
            raise ClaimedError(
                f"another job has taken {self.url} over, since this one stood still: this one ends at its next save"
            )

    def _push(self) -> None:
        """Copies what changed to the URL in the order in which it was written: what comes last speaks of the rest."""
        with self._is_pushing:
            states = self._states()
            changed = [name for name, state in states.items() if self._pushed.get(name) != state]
            if changed:
                self._look_at_claim()
            for name in sorted(changed, key=states.get):
                try:
                    upload_file(self.local / name, f"{self.url}/{name}")
                    self._pushed[name] = states[name]
                except FileNotFoundError:
                    if (self.local / name).exists():  # it was not renamed meanwhile: the bucket is gone
                        raise

    def _try_push(self) -> None:
        """A store that fails delays the files and never ends the run: one warning, until it succeeds again."""
        try:
            self._push()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                after = "" if self._is_lost else ". Training goes on, and they are copied once it takes them"
                log.warning("the files in %s do not reach %s (%s)%s", self.local, self.url, error, after)
            self._is_failing = True

    def _states(self) -> dict[str, tuple[int, int]]:
        """The `_state` of every file to copy, by its path in the folder."""
        states = {}
        for folder, subfolders, files in os.walk(self.local):
            subfolders[:] = [name for name in subfolders if name != "checkpoints" and not name.endswith(_NOT_WHOLE)]
            for path in (Path(folder, name) for name in files if not name.startswith(".")):
                with suppress(FileNotFoundError):  # it is being renamed
                    states[str(path.relative_to(self.local))] = _state(path)
        return states

    def _look_at_claim(self) -> None:
        self._is_lost = self._is_lost or not self._is_held()
        self.check_claim()


def _state(path: Path) -> tuple[int, int]:
    """Changes whenever the file does; ordered by the time of the last change."""
    return path.stat().st_mtime_ns, path.stat().st_size
