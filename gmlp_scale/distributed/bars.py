"""Progress bars that a log file can hold."""

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

LINE_EVERY_SECONDS = 30.0


def progress_bar(iterable: Iterable | None = None, **options: Any) -> tqdm:
    """tqdm on standard error. Without a terminal, as in a Slurm job, it writes a line now and then and at its end."""
    file = sys.stderr if sys.stderr.isatty() else Lines(sys.stderr, LINE_EVERY_SECONDS)
    return tqdm(iterable, file=file, **options)


class Lines:
    """A file for tqdm that has no carriage returns.

    It writes what tqdm draws as a line, at most one every so many seconds, and the last one where tqdm ends its line.
    """

    def __init__(self, file: TextIO, every_seconds: float):
        self._file, self._every_seconds = file, every_seconds
        self._latest, self._due = "", time.monotonic() + every_seconds

    def write(self, text: str) -> None:
        is_end = text.endswith("\n")
        self._latest = text.strip() or self._latest
        if self._latest and (is_end or time.monotonic() >= self._due):
            print(self._latest, file=self._file, flush=True)
            self._latest, self._due = "", time.monotonic() + self._every_seconds

    def flush(self) -> None:
        """Every line is flushed."""
