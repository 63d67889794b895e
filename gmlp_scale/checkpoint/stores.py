"""Where a run's checkpoints are: in a folder on a filesystem that all ranks share, or at a URL.

At a URL, such as s3://bucket/runs/gmlp_base/checkpoints, a save writes its files to a folder of each host first, the
staging folder. Every rank then uploads its own, a large one in parts, while training goes on. Rank 0 uploads DONE when
all the others are there. Stores have no rename: a folder is a checkpoint if it has DONE. So DONE is the last to come,
and the first to go when a checkpoint is deleted. What a kill leaves has no DONE, and the next run deletes it.
"""

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gmlp_scale.checkpoint.format import (
    STEP_FOLDER,
    Checkpoint,
    CheckpointError,
    CheckpointVersionError,
    read_done,
    step_folders,
    step_of,
)
from gmlp_scale.checkpoint.pieces import fsync, write_pieces
from gmlp_scale.engine import Piece
from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import (
    delete_file,
    download_file,
    is_url,
    list_files,
    read_file,
    upload_file,
    write_file,
    write_text,
)
from gmlp_scale.storage.run_folder import RemoteFolder

log = logging.getLogger(__name__)

NEVER_PASSES = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}
"""What stops a save and no waiting mends."""
NUM_TRANSFERS = 4
"""Files that are copied at a time. Of a large file, several parts are."""


class LocalCheckpoints:
    """The checkpoints of one run. `name` is a checkpoint's folder, and `attempt` the name of one try to save it."""

    is_shared = True
    """Whether `directory` is `place`, for all hosts. Else it holds copies, and the ranks of one host share it."""

    def __init__(self, directory: Path):
        self.place = str(directory)
        """The run's folder `checkpoints`: a path or a URL."""
        self.directory = directory
        """Where this host's ranks write and read files."""
        self._lock: bytes | None = None

    def names(self) -> list[str]:
        """In the order of steps."""
        return [path.name for path in step_folders(self.directory)]

    def open(self, name: str, verify_files: bool = True) -> Checkpoint:
        """Unless all files are to be verified, only DONE is read.

        Raises:
            CheckpointError: the checkpoint is damaged or absent.
            OSError: the place cannot be read.
        """
        return Checkpoint.open(self.directory / name, verify_files)

    def write(self, name: str, attempt: str, rank: int, pieces: dict[str, Piece]) -> dict[str, Any]:
        """Writes one rank's files. Returns their receipt, as write_pieces does."""
        self.directory.mkdir(exist_ok=True)
        return write_pieces(self.directory / attempt, rank, pieces)

    def publish(self, name: str, attempt: str, done: str) -> None:
        """Writes DONE and makes a checkpoint of all ranks' files."""
        (self.directory / attempt).stat()  # fails if the run folder was moved away: write_text would make a new one
        write_text(self.directory / attempt / "DONE", done)
        final = self.directory / name
        if final.exists():
            raise CheckpointError(f"{final} is there already")
        (self.directory / attempt).rename(final)
        fsync(self.directory)

    def set_aside(self, name: str, suffix: str) -> None:
        """Renames a damaged checkpoint, so that it counts as none. Its files stay."""
        (self.directory / name).rename(self.directory / f"{name}.{suffix}")

    def delete(self, name: str) -> None:
        remove(self.directory / name)

    def prepare(self) -> None:
        """At a run's start, on rank 0: deletes what killed saves and deletions left, and sees that files can be made.

        Leaves no folder that was not there. InputError if no waiting makes this a place for checkpoints.
        """
        is_new = not os.path.lexists(self.directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            if error.errno in NEVER_PASSES:
                needed = "needed: a folder that you may write to. Move it away, or mount its disk"
                raise InputError(f"{self.directory} cannot hold checkpoints ({error.strerror}); {needed}") from None
        for leftover in self.directory.glob("step_*.tmp-*"):
            remove(leftover)
        if is_new:
            with suppress(OSError):
                self.directory.rmdir()
        self._lock = self._found_lock()

    def check_run_folder(self) -> None:
        """Raises InputError if the run folder, or its LOCK, was deleted or moved since `prepare`."""
        with suppress(OSError):  # a disk may fail for a moment
            if self._found_lock() != self._lock:
                needed = "Move it back, and the same command resumes from its newest checkpoint"
                raise InputError(
                    f"{self.directory.parent}, or its LOCK, was deleted or moved away: the run ends. {needed}"
                )

    def _found_lock(self) -> bytes | None:
        """What the run folder's LOCK says, which is whose it is; None if there is none."""
        try:
            return read_file(self.directory.parent / "LOCK")
        except (FileNotFoundError, NotADirectoryError):
            return None


class RemoteCheckpoints:
    """What LocalCheckpoints is, at a URL.

    Args:
        place: the URL.
        directory: the staging folder.
        run_folder: the folder of the run that saves here, which this process or its rank 0 holds.
    """

    is_shared = False

    def __init__(self, place: str, directory: Path, run_folder: RemoteFolder | None = None):
        self.place, self.directory, self.run_folder = place, directory, run_folder

    def names(self) -> list[str]:
        """The folders with a DONE."""
        return [name for name, files in self._folders().items() if self._has_done(name, files)]

    def open(self, name: str, verify_files: bool = True) -> Checkpoint:
        """Copies the checkpoint here first."""
        url, folder = f"{self.place}/{name}", self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            download_file(f"{url}/DONE", folder / "DONE")
            if verify_files:
                self._transfer(lambda file: download_file(f"{url}/{file}", folder / file), read_done(folder).files)
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is not whole: {error}") from error
        return Checkpoint.open(folder, verify_files)

    def write(self, name: str, attempt: str, rank: int, pieces: dict[str, Piece]) -> dict[str, Any]:
        for copy in step_folders(self.directory):  # of the checkpoint that the run resumed from: all ranks have read it
            shutil.rmtree(copy, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        folder = self.directory / f"{attempt}-{rank}"
        try:
            receipt = write_pieces(folder, rank, pieces)
            self._transfer(lambda file: upload_file(folder / file, f"{self.place}/{name}/{file}"), receipt["files"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return receipt

    def publish(self, name: str, attempt: str, done: str) -> None:
        if self.run_folder:
            self.run_folder.before_publish()
        write_file(f"{self.place}/{name}/DONE", done.encode())

    def set_aside(self, name: str, suffix: str) -> None:
        done = f"{self.place}/{name}/DONE"
        write_file(f"{done}.{suffix}", read_file(done))
        delete_file(done)

    def delete(self, name: str) -> None:
        folder = f"{self.place}/{name}"
        delete_file(f"{folder}/DONE")
        self._transfer(lambda file: delete_file(f"{folder}/{file}"), list_files(folder))

    def prepare(self) -> None:
        for name, files in self._folders().items():
            if not any(file.startswith("DONE.") for file in files) and not self._has_done(name, files):
                self.delete(name)

    def check_run_folder(self) -> None:
        """Raises ClaimedError once another job was seen to hold the run folder."""
        if self.run_folder:
            self.run_folder.check_claim()

    def _has_done(self, name: str, files: list[str]) -> bool:
        """Some stores list a new file late, so a DONE that is not listed is asked for."""
        try:
            return "DONE" in files or bool(read_file(f"{self.place}/{name}/DONE"))
        except FileNotFoundError:
            return False

    def _folders(self) -> dict[str, list[str]]:
        """The files of each folder, in the order of steps."""
        folders = {}
        for path in list_files(self.place):
            name, _, file = path.partition("/")
            if STEP_FOLDER.fullmatch(name):
                folders.setdefault(name, []).append(file)
        return folders

    def _transfer(self, transfer: Callable[[str], None], files: Iterable[str]) -> None:
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            list(pool.map(transfer, files))


Checkpoints = LocalCheckpoints | RemoteCheckpoints


@contextmanager
def checkpoints_of(run_folder: str | Path) -> Iterator[Checkpoints]:
    """A run's checkpoints. Copies of those at a URL last as long as the body."""
    if not is_url(run_folder):
        yield LocalCheckpoints(Path(run_folder) / "checkpoints")
        return
    with tempfile.TemporaryDirectory() as directory:
        yield RemoteCheckpoints(f"{run_folder}/checkpoints", Path(directory))


def saved_steps(run_folder: str | Path) -> list[int]:
    """The steps of a run's checkpoints, good or damaged, in order."""
    with checkpoints_of(run_folder) as checkpoints:
        return [step_of(name) for name in checkpoints.names()]


def newest_of(checkpoints: Checkpoints, verify_files: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that opens, or None, and the names of the newer, damaged ones, which a warning names.

    Changes nothing where the checkpoints are. Raises CheckpointError if all are damaged, naming each, or if the newest
    usable one is of another version.
    """
    problems: dict[str, str] = {}
    for name in reversed(checkpoints.names()):
        try:
            checkpoint = checkpoints.open(name, verify_files)
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            problems[name] = str(error)
            continue
        if problems:
            log.warning("damaged checkpoint: %s. Taking %s instead", "; ".join(problems.values()), name)
        return checkpoint, list(problems)
    if problems:
        found = "; ".join(problems.values())
        raise CheckpointError(
            f"no checkpoint in {checkpoints.place} is whole: {found}. Move them away to start from step 0"
        )
    return None, []


def newest_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """As newest_of the checkpoints in a folder."""
    return newest_of(LocalCheckpoints(directory))


def remove(folder: Path) -> None:
    """Deletes a folder. A checkpoint is renamed first, so that half of one never has its name."""
    try:
        if STEP_FOLDER.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-deleted"))
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("could not delete %s: %s", folder, error)
