"""A run folder at a URL, such as s3://bucket/runs/gmlp_base, that a run works on in local folders.

Every host has a local folder. What rank 0's host has in it, metrics and TensorBoard's files above all, is copied to the
URL every few seconds. Checkpoints have their own way there: gmlp_scale/checkpoint/remote_checkpoints.py.
"""

import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gmlp_scale.checkpoint.remote_checkpoints import RemoteCheckpoints
from gmlp_scale.storage.files import download_file, list_files, upload_file
from gmlp_scale.storage.repeating import repeating
from gmlp_scale.storage.run_folder import RunFolderError, claimed

log = logging.getLogger(__name__)

PUSH_EVERY_SECONDS = 5.0
_NOT_WHOLE = (".new", ".old")
"""Ends of the names of folders that are about to be renamed or deleted."""


class RemoteFolder:
    """One run's folder. `local` is the run's while it holds the claim; what an earlier run left there is deleted."""

    def __init__(self, url: str, local: Path):
        self.url, self.local = url, local
        self.checkpoints = RemoteCheckpoints(f"{url}/checkpoints", local / "checkpoints", self._before_publish)
        self._pushed: dict[str, tuple[int, int]] = {}
        self._is_pushing, self._is_failing = threading.Lock(), False

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Holds the folder for this process. RunFolderError if another one holds it."""
        with claimed(self.url) as self._is_held:
            yield

    @contextmanager
    def local_folder(self) -> Iterator[None]:
        """Makes `local` an empty folder, which only this user can read. It stays if the body fails."""
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True, mode=0o700)
        yield
        shutil.rmtree(self.local, ignore_errors=True)

    @contextmanager
    def mirrored(self) -> Iterator[None]:
        """Copies the run folder's own files, not those of its subfolders, to `local`; then copies back what changes.

        Raises OSError if the last files cannot be copied back, and leaves them in `local`. After a body that failed,
        that is a warning.
        """
        for name in list_files(self.url):
            if "/" not in name:
                download_file(f"{self.url}/{name}", self.local / name)
                self._pushed[name] = _state(self.local / name)
        try:
            with repeating(self._try_push, PUSH_EVERY_SECONDS):
                yield
        except BaseException:
            self._try_push()
            raise
        try:
            self._push()
        except OSError as error:
            raise OSError(f"{error}. The files are in {self.local}: copy them; the next start deletes them") from error

    def _push(self) -> None:
        """Copies what changed to the URL in the order in which it was written: what comes last tells of the rest."""
        with self._is_pushing:
            states = self._states()
            changed = [name for name, state in states.items() if self._pushed.get(name) != state]
            if changed:
                self._check_claim()
            for name in sorted(changed, key=states.get):
                try:
                    upload_file(self.local / name, f"{self.url}/{name}")
                    self._pushed[name] = states[name]
                except FileNotFoundError:
                    if (self.local / name).exists():  # it was not renamed meanwhile: the bucket is gone
                        raise

    def _try_push(self) -> None:
        """A store that fails delays the files and never ends the run: that is told once, until it succeeds again."""
        try:
            self._push()
            self._is_failing = False
        except Exception as error:
            if not self._is_failing:
                log.warning(
                    "the files in %s do not reach %s (%s). Training goes on, and they are copied once it takes them",
                    self.local,
                    self.url,
                    error,
                )
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

    def _before_publish(self) -> None:
        """A checkpoint is published with all metrics up to its step, and only by the job that holds the folder."""
        self._check_claim()
        self._try_push()

    def _check_claim(self) -> None:
        if not self._is_held():
            raise RunFolderError(f"another job has taken {self.url} over, since this one stood still: end this one")


def _state(path: Path) -> tuple[int, int]:
    """Changes whenever the file does; ordered by the time of the last change."""
    return path.stat().st_mtime_ns, path.stat().st_size
