"""Checkpoints in a folder on a filesystem that all ranks share."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from gmlp_scale.checkpoint.checkpoint_files import fsync
from gmlp_scale.checkpoint.format import STEP_FOLDER, Checkpoint, CheckpointError, newest_checkpoint, step_folders
from gmlp_scale.storage.files import write_text

logger = logging.getLogger("gmlp_scale")


class LocalCheckpoints:
    """The checkpoints of one run. RemoteCheckpoints has the same methods for a run at a URL."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def names(self) -> list[str]:
        """The checkpoints' folders, in the order of steps."""
        return [path.name for path in step_folders(self.directory)]

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        return newest_checkpoint(self.directory)

    def open(self, name: str) -> Checkpoint:
        """Verified. CheckpointError if it is damaged or absent."""
        return Checkpoint.open(self.directory / name)

    def glance(self, name: str) -> Checkpoint:
        """Only what DONE says: the files are not verified. Raises as `open`."""
        return Checkpoint.open(self.directory / name, verify_files=False)

    def upload(self, folder: Path, files: list[str], name: str) -> None:
        """Does nothing: the ranks write where the checkpoint is made."""

    def publish(self, folder: Path, name: str, done: str) -> None:
        """Turns a folder with all ranks' files into the checkpoint `name`."""
        write_text(folder / "DONE", done)
        final = self.directory / name
        if final.exists():
            raise CheckpointError(f"{final} is there already")
        folder.rename(final)
        fsync(self.directory)

    def set_aside(self, name: str, suffix: str) -> None:
        """Renames a damaged checkpoint, which stays."""
        (self.directory / name).rename(self.directory / f"{name}.{suffix}")

    def drop_oldest(self, stays: Callable[[str], bool]) -> str | None:
        """Deletes the oldest checkpoint to make room and returns its name, but never the newest, nor one that stays."""
        older = [name for name in self.names()[:-1] if not stays(name)]
        if older:
            self.delete(older[0])
        return older[0] if older else None

    def delete(self, name: str) -> None:
        remove(self.directory / name)

    def delete_unfinished(self) -> None:
        """Deletes what killed saves and deletions left."""
        for leftover in self.directory.glob("step_*.tmp-*"):
            remove(leftover)

    def end_attempt(self, folder: Path) -> None:
        """Does nothing: `publish` renamed the folder, or the attempt failed and rank 0 removed it."""


def remove(folder: Path) -> None:
    """Deletes a folder. A checkpoint is renamed first, so that half of one never has its name."""
    try:
        if STEP_FOLDER.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-deleted"))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("could not delete %s: %s", folder, error)
