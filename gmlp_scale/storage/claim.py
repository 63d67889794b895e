"""One job at a time works in an output folder, however the job before it ended.

The file with the highest number in the folder of claims says which job holds the folder. A job creates it, which fails
if the number is taken, and rewrites it every few seconds. Another job may take the next number once the file says that
its job ended, the job's process is gone, or the file no longer changes. Files are never removed, so each number is
taken once.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gmlp_scale.errors import UserError
from gmlp_scale.storage.files import create_file, open_filesystem, read_json, redacted, with_retries, write_file

log = logging.getLogger(__name__)

_BEAT_SECONDS = 5.0
_GONE_AFTER_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.5


class ClaimedError(UserError):
    """Another job works in the folder."""


@contextmanager
def hold_folder(output: str, claims: str) -> Iterator[Callable[[], bool]]:
    """Hold the folder `output`, whose claims are in the folder `claims`, while the body runs.

    Yields a function that returns whether we still hold it: while this process stood still, another job may have taken
    the folder. Raises ClaimedError naming the other job that holds it.
    """
    mine = {"host": socket.gethostname(), "process": os.getpid(), "processes": _processes(), "id": uuid.uuid4().hex}
    mine |= {"beats": 0, "ended": False}
    number = _take(claims, output, mine)

    def rewrite(**changes) -> None:
        mine.update(changes)
        # Where the store cannot be reached, the job's own writes fail too; and the next job waits until a claim that
        # did not end stands still.
        with suppress(OSError):
            write_file(_name(claims, number), _encoded(mine))

    try:
        with repeating(lambda: rewrite(beats=mine["beats"] + 1), _BEAT_SECONDS):
            yield lambda: _newest(claims) <= number  # a listing may lack what is new
    finally:
        rewrite(ended=True)


@contextmanager
def repeating(call: Callable[[], object], every_seconds: float) -> Iterator[None]:
    """Repeats a call in a thread while the body runs."""
    ended = threading.Event()

    def repeat():
        while not ended.wait(every_seconds):
            call()

    thread = threading.Thread(target=repeat, name="repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _take(url: str, output: str, mine: dict) -> int:
    """The number of the claim that is now ours."""
    number = _newest(url)
    while True:
        if number:
            _wait_until_gone(_name(url, number), output)
        number += 1
        with suppress(FileExistsError):  # another job was quicker, or the listing was late
            create_file(_name(url, number), _encoded(mine))
            return number


def _newest(url: str) -> int:
    return max((int(name.removesuffix(".json")) for name in json_names(url)), default=0)


def _wait_until_gone(name: str, output: str) -> None:
    """Return when the claim's job is gone. Raises ClaimedError as soon as the claim changes.

    Returns at once where the claim says that its job ended, or the job was a process that this one would see and does
    not.
    """
    deadline = time.monotonic() + _GONE_AFTER_SECONDS
    first = None
    while time.monotonic() < deadline:
        holder = read_json(name)
        first = first or holder
        is_near = holder.get("processes") == _processes()
        if holder["ended"] or (is_near and not _is_other_process(holder["process"])):
            return
        if holder != first:
            by = f"process {holder['process']} on {holder['host']}"
            raise ClaimedError(f"another job writes to {output}: {by}. Wait for it or stop it")
        time.sleep(_LOOK_EVERY_SECONDS)
    log.warning(
        "%s was held by process %s on %s, which has shown no sign for %.0f s: taking it over",
        redacted(output),
        first["process"],
        first["host"],
        _GONE_AFTER_SECONDS,
    )


def _processes() -> str:
    """What processes that see one another share: the start of the machine, and the container's set of processes. The
    host's name does not tell: a container may have that of its machine."""
    start = Path("/proc/sys/kernel/random/boot_id")
    processes = Path("/proc/self/ns/pid")
    return f"{start.read_text().strip()} {processes.readlink()}" if processes.is_symlink() else socket.gethostname()


def _is_other_process(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process != os.getpid()  # a number is given again


def json_names(url: str) -> list[str]:
    """The sorted names of a folder's JSON files; none where there is no such folder."""
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    try:
        paths = with_retries(lambda: filesystem.ls(path, detail=False), f"listing {url}")
    except FileNotFoundError:
        return []
    return sorted(path.rsplit("/", 1)[-1] for path in paths if path.endswith(".json"))


def _name(url: str, number: int) -> str:
    return f"{url}/{number:06d}.json"


def _encoded(claim: dict) -> bytes:
    return (json.dumps(claim) + "\n").encode()
