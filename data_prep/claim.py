"""One job at a time in an output folder, however the one before it ended.

A job holds the folder by the file of the highest number in OUTPUT/job/claims, which it created when there was none of
that number and writes anew every few seconds. Who finds it ended, its process gone or the file standing still, takes
the next number. Files are never removed, so each number is taken once.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gmlp_scale.files import create_file, open_filesystem, read_file, with_retries, write_file

_BEAT_SECONDS = 5.0
_GONE_AFTER_SECONDS = 30.0
_LOOK_EVERY_SECONDS = 0.5


class ClaimedError(ValueError):
    """Another job works in the folder."""


@contextmanager
def claimed(url: str, output: str) -> Iterator[None]:
    """Hold the folder of claims `url` while the body runs. Raises ClaimedError naming the job that holds it."""
    mine = {"host": socket.gethostname(), "process": os.getpid(), "id": uuid.uuid4().hex, "beats": 0, "ended": False}
    number = _take(url, output, mine)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(_name(url, number), mine, ended), name="claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        write_file(_name(url, number), _encoded(mine | {"ended": True}))


def _take(url: str, output: str, mine: dict) -> int:
    """The number of the claim that is now ours."""
    number = max(_numbers(url), default=0)
    if number:
        _see_that_it_is_gone(_name(url, number), output)
    try:
        create_file(_name(url, number + 1), _encoded(mine))
    except FileExistsError as error:
        raise _refusal(json.loads(read_file(_name(url, number + 1))), output) from error
    return number + 1


def _see_that_it_is_gone(name: str, output: str) -> None:
    """Return when the claim's job is gone: at once where it says so or was a process of this machine, else when its
    claim has stood still for long. Raises ClaimedError once it moves."""
    deadline = time.monotonic() + _GONE_AFTER_SECONDS
    first = None
    while time.monotonic() < deadline:
        holder = json.loads(read_file(name))
        first = first or holder
        if holder["ended"] or (holder["host"] == socket.gethostname() and not _is_other_process(holder["process"])):
            return
        if holder != first:
            raise _refusal(holder, output)
        time.sleep(_LOOK_EVERY_SECONDS)


def _is_other_process(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process != os.getpid()  # a container that was started again may have its old numbers


def _refusal(holder: dict, output: str) -> ClaimedError:
    return ClaimedError(
        f"another job writes to {output}: process {holder['process']} on {holder['host']}. Wait for it or stop it"
    )


def _beat(name: str, mine: dict, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_SECONDS):
        mine["beats"] += 1
        with suppress(OSError):  # a store out of reach: the job's own writes will tell
            write_file(name, _encoded(mine))


def _numbers(url: str) -> list[int]:
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    try:
        paths = with_retries(lambda: filesystem.ls(path, detail=False), f"listing {url}")
    except FileNotFoundError:
        return []
    return [int(path.rsplit("/", 1)[-1].removesuffix(".json")) for path in paths if path.endswith(".json")]


def _name(url: str, number: int) -> str:
    return f"{url}/{number:06d}.json"


def _encoded(claim: dict) -> bytes:
    return (json.dumps(claim) + "\n").encode()
