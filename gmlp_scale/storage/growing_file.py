"""Files that are only added to. A full disk delays them and never ends the run."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path

log = logging.getLogger(__name__)


class _Additions(ABC):
    """What is added to a file. What the disk refuses is kept in memory, and written first once there is room."""

    def __init__(self, path: Path):
        self.path = path
        self.unwritten: list[bytes] = []
        """What the disk has refused so far."""
        self._is_failing = False

    def write(self, *contents: bytes) -> None:
        """Raises nothing: a failure is logged once, until a write succeeds again."""
        self.unwritten += contents
        try:
            while self.unwritten:
                self._write_first()
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

    @abstractmethod
    def _write_first(self) -> None:
        """Writes the first of what is unwritten, whole. Raises OSError."""


class GrowingFile(_Additions):
    """A file that one process adds to. It goes on where a full disk cut it short."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        self.write()
        if self.unwritten:
            log.warning("%s ends %d bytes early", self.path, sum(map(len, self.unwritten)))
        self._file.close()

    def _write_first(self) -> None:
        while self.unwritten[0]:
            self.unwritten[0] = self.unwritten[0][self._file.write(self.unwritten[0]) :]


class SharedLines(_Additions):
    """A file that several processes add lines to. It appears with its first line.

    Each line is a single write, so that lines do not mix. After one that was cut short, the next begins anew.
    """

    def lines(self) -> list[bytes]:
        """The lines of the file, and those that it lacks."""
        written = self.path.read_bytes().splitlines() if self.path.exists() else []
        return written + self.unwritten

    def _write_first(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            file.seek(max(0, file.tell() - 1))
            start = b"" if file.read(1) in (b"", b"\n") else b"\n"
            content = start + self.unwritten[0] + b"\n"
            while content:  # a second write raises what made the first one short
                content = content[file.write(content) :]
