"""Checkpoints in a run folder at a URL, such as s3://bucket/runs/gmlp_base/checkpoints.

A save writes its files to a folder of each host first, the staging folder. Every rank then uploads its own, a large one
in parts, while training goes on. Rank 0 uploads DONE when all the others are there. Stores have no rename: a folder is
a checkpoint if it has DONE. So DONE is the last to come, and the first to go when a checkpoint is deleted. What a kill
leaves has no DONE, and the next run deletes it.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from gmlp_scale.checkpoint.format import (
    STEP_FOLDER,
    Checkpoint,
    CheckpointError,
    newest_of,
    read_done,
    step_folders,
    step_of,
)
from gmlp_scale.checkpoint.local_checkpoints import LocalCheckpoints
from gmlp_scale.storage.files import delete_file, download_file, is_url, list_files, read_file, upload_file, write_file

NUM_TRANSFERS = 4
"""Files that are copied at a time. Of a large file, several parts are."""


class RemoteCheckpoints:
    """The checkpoints of one run.

    Args:
        url: the folder `checkpoints` of the run folder.
        directory: the staging folder, which the ranks of one host share.
        before_publish: called before a DONE is uploaded; what it raises fails the save.
    """

    def __init__(self, url: str, directory: Path, before_publish: Callable[[], None] = lambda: None):
        self.url, self.directory, self.before_publish = url, directory, before_publish

    def __str__(self) -> str:
        return f"{self.directory}, and see that {self.url} can be written to"

    def names(self) -> list[str]:
        """The folders with a DONE, in the order of steps."""
        return [name for name, files in self._folders().items() if "DONE" in files]

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """As newest_checkpoint, from copies on this machine."""
        return newest_of(self.names(), self.open, self.url)

    def open(self, name: str) -> Checkpoint:
        """Copies a checkpoint here and verifies it.

        Raises:
            CheckpointError: it is damaged or absent.
            OSError: the store cannot be read.
        """
        url, folder = f"{self.url}/{name}", self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            download_file(f"{url}/DONE", folder / "DONE")
            self._transfer(lambda file: download_file(f"{url}/{file}", folder / file), read_done(folder).files)
        except FileNotFoundError as error:
            raise CheckpointError(f"{name} is not whole: {error}") from error
        return Checkpoint.open(folder)

    def glance(self, name: str) -> Checkpoint:
        """Only what DONE says: no other file is copied here. Raises OSError if the store cannot be read."""
        (self.directory / name).mkdir(exist_ok=True)
        download_file(f"{self.url}/{name}/DONE", self.directory / name / "DONE")
        return Checkpoint.open(self.directory / name, verify_files=False)

    def upload(self, folder: Path, files: list[str], name: str) -> None:
        """Copies one rank's files of a checkpoint to the store. OSError if it refuses."""
        self._transfer(lambda file: upload_file(folder / file, f"{self.url}/{name}/{file}"), files)

    def publish(self, folder: Path, name: str, done: str) -> None:
        """Uploads DONE, which makes the uploaded files a checkpoint."""
        self.before_publish()
        write_file(f"{self.url}/{name}/DONE", done.encode())

    def set_aside(self, name: str, suffix: str) -> None:
        """Renames a damaged checkpoint's DONE, so that it counts as none. Its files stay until the step is deleted."""
        write_file(f"{self.url}/{name}/DONE.{suffix}", read_file(f"{self.url}/{name}/DONE"))
        delete_file(f"{self.url}/{name}/DONE")

    def delete(self, name: str) -> None:
        delete_file(f"{self.url}/{name}/DONE")
        folder = f"{self.url}/{name}"
        self._transfer(lambda file: delete_file(f"{folder}/{file}"), list_files(folder))

    def delete_unfinished(self) -> None:
        """Deletes what killed saves and deletions left."""
        for name, files in self._folders().items():
            if not any(file.startswith("DONE") for file in files):
                self.delete(name)

    def drop_oldest(self, stays: Callable[[str], bool]) -> None:
        """Does nothing: the full disk has only copies."""

    def end_attempt(self, folder: Path) -> None:
        """Deletes this host's files of a save, and its copy of the checkpoint that the run resumed from."""
        for copy in (folder, *step_folders(self.directory)):
            shutil.rmtree(copy, ignore_errors=True)

    def _folders(self) -> dict[str, list[str]]:
        folders = {}
        for path in list_files(self.url):
            name, _, file = path.partition("/")
            if STEP_FOLDER.fullmatch(name):
                folders.setdefault(name, []).append(file)
        return dict(sorted(folders.items()))

    def _transfer(self, transfer: Callable[[str], None], files: Iterable[str]) -> None:
        with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
            list(pool.map(transfer, files))


@contextmanager
def checkpoints_of(run_folder: str | Path) -> Iterator[LocalCheckpoints | RemoteCheckpoints]:
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
