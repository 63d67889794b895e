"""Files that are only added to. A full disk delays them and never ends the run."""

import logging
from pathlib import Path

from gmlp_scale.storage.files import read_file

log = logging.getLogger(__name__)


class GrowingFile:
    """A file that one process adds to. It goes on where a full disk cut it short.

    What the disk refuses is kept in memory, and written first once there is room. The file is opened for each write, so
    one that was deleted or moved meanwhile begins anew.
    """

    def __init__(self, path: Path):
        self.path = path
        self.unwritten: list[bytes] = []
        """What the disk has refused so far."""
        self._is_failing, self._was_there = False, path.exists()

    def write(self, *contents: bytes) -> None:
        """Raises nothing: a failure is logged once, until a write succeeds again."""
        self.unwritten += contents
        try:
            while self.unwritten:
                is_new = not self.path.exists()
                self._write_first()
                if is_new and self._was_there:
                    log.warning("%s was deleted or moved away: what follows is in a new file there", self.path)
                self._was_there = True
                del self.unwritten[0]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): free room there. Training goes on, and what is missing is written once "
                    "there is room",
                    self.path,
                    error.strerror,
                )
            self._is_failing = True

    def close(self) -> None:
        self.write()
        if self.unwritten:
            log.warning("%s ends %d bytes early", self.path, sum(map(len, self.unwritten)))

    def _write_first(self) -> None:
        """Writes the first of what is unwritten, whole. Raises OSError."""
        with self.path.open("ab", buffering=0) as file:
            while self.unwritten[0]:
                self.unwritten[0] = self.unwritten[0][file.write(self.unwritten[0]) :]


class SharedLines(GrowingFile):
    """A file that several processes add lines to.

    Each line is a single write, so that lines do not mix. After one that was cut short, the next begins anew.
    """

    def lines(self) -> list[bytes]:
        """The lines of the file, and those that it lacks."""
        written = read_file(self.path).splitlines() if self.path.exists() else []
        return written + self.unwritten

    def _write_first(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            file.seek(max(0, file.tell() - 1))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            content = start + self.unwritten[0] + b"\n"
            while content:  # a second write raises what made the first one short
                content = content[file.write(content) :]
