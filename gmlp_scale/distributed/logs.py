"""What a process of a run says: its log, its progress bars, and the error that ends it."""

import functools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tqdm import tqdm

from gmlp_scale import leave_at_once
from gmlp_scale.errors import USER_ERRORS, LostRankError, exit_code
from gmlp_scale.storage.files import print_error, redacted

if TYPE_CHECKING:
    from gmlp_scale.distributed.world import World

OTHERS_REPORT_AFTER_SECONDS = 10.0
"""DeepSpeed's launcher looks for ended ranks every second."""
LINE_EVERY_SECONDS = 30.0


class _RedactedLines(logging.Formatter):
    """Hides the secrets in URLs, in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def set_up_logging(world: "World") -> None:
    """Sends the package's log to standard error: all lines of rank 0, warnings of the others, each with its rank."""
    rank = f" rank {world.rank}" if world.size > 1 else ""
    line = logging.StreamHandler(sys.stderr)
    line.setFormatter(_RedactedLines(f"%(asctime)s{rank} %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    log = logging.getLogger("gmlp_scale")
    log.handlers = [line]
    log.propagate = False
    log.setLevel(logging.INFO if world.is_main else logging.WARNING)


def command(main: Callable[[], int]) -> Callable[[], int]:
    """Makes a script's main print a user's mistake or Ctrl-C without a traceback, and return the exit code.

    Any other error keeps its traceback.
    """

    @functools.wraps(main)
    def reporting_main() -> int:
        if signal.getsignal(signal.SIGINT) is leave_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main()
        except USER_ERRORS as error:
            report(error)
            code = exit_code(error)
            if isinstance(error, LostRankError):
                leave_without_others(code)
            return code
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cut off the end
            print_error("interrupted")
            return 128 + signal.SIGINT

    return reporting_main


def report(error: BaseException) -> None:
    """Prints the error that ends this process: once for all ranks, and as late as the launcher allows.

    Most errors happen on every rank. So rank 0 prints its own at once and leaves, and the launcher then ends the
    others. A rank that is alive after OTHERS_REPORT_AFTER_SECONDS has an error of its own, and prints it. torchrun
    prints its own report last, so the message goes into that report. After a LostRankError every rank prints it at
    once: rank 0 may be lost, and a launcher that was cut off prints no report.
    """
    is_lost = isinstance(error, LostRankError)
    if os.environ.get("RANK", "").strip("0").isdigit() and not is_lost:
        time.sleep(OTHERS_REPORT_AFTER_SECONDS)
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) and not is_lost:
        content = {"message": redacted(str(error)), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": content}), encoding="utf-8")
    else:
        print_error(error)


def leave_without_others(exit_code: int) -> NoReturn:
    """Ends this process after a LostRankError without Python's clean-up, in which the process groups' destructors wait
    for the ranks that are gone. With a timeout of 10 s they took 15 s after a link was cut."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def progress_bar(iterable: Iterable | None = None, **options: Any) -> tqdm:
    """tqdm on standard error. Without a terminal, as in a Slurm job, it writes a line now and then and at its end."""
    if sys.stderr.isatty():
        return tqdm(iterable, file=sys.stderr, **options)
    # Position 0, also beside another bar: tqdm would move the cursor between them.
    return tqdm(iterable, file=_Lines(), position=0, **options)


class _Lines:
    """A file for tqdm that has no carriage returns.

    It writes what tqdm draws as a line, one in LINE_EVERY_SECONDS at most, and the last one where tqdm ends its line.
    """

    def __init__(self):
        self._latest, self._due = "", time.monotonic() + LINE_EVERY_SECONDS

    def write(self, text: str) -> None:
        is_end = text.endswith("\n")
        self._latest = text.strip() or self._latest
        if self._latest and (is_end or time.monotonic() >= self._due):
            print(self._latest, file=sys.stderr, flush=True)
            self._latest, self._due = "", time.monotonic() + LINE_EVERY_SECONDS

    def flush(self) -> None:
        """Every line is flushed."""
