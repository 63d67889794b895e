"""Whole files, read and written by path or URL. A file appears only when it is whole. A failed call to a store is
repeated.

A URL may hold a password or a signature. `redacted` takes them out of all that is written or printed.
"""

import argparse
import errno
import json
import logging
import os
import re
import socket
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import fsspec
import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from pydantic import BeforeValidator

from gmlp_scale.errors import InputError

log = logging.getLogger(__name__)

T = TypeVar("T")

_REFUSALS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT = (*_REFUSALS, ValueError, TypeError, ImportError)
_WAIT_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
_UNREACHABLE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)

MOST_LEVELS = 100
"""Of lists and objects in one another in a JSON or YAML text."""

_store_has_answered = False
"""Whether any store has answered this process. Before that, a store that is out of reach is a mistake of the set-up."""

# user:password@ of any URL, token@ of a web address, and the whole query of a URL that is signed: its date changes too.
_SECRETS_OF_URLS = re.compile(
    r"""(?<=://)[^\s/?#'"]*:[^\s/?#'"]*@ | (?<=https://)[^\s/?#'"]+@ | (?<=http://)[^\s/?#'"]+@
    | (?<=\?)[^\s?'"]*(?:signature|sig|token|credential|secret|password|key)[^\s?'"=]*=[^\s'"]*""",
    re.IGNORECASE | re.VERBOSE,
)


class PlaceError(InputError, OSError):
    """A path or URL cannot be opened as it stands, or lacks its store's key."""


class StoreError(OSError):
    """A store failed at every try."""


def redacted(value: T) -> T:
    """A text, or the texts in a JSON-able value, with *** for the passwords and signatures of URLs."""
    match value:
        case str():
            return _SECRETS_OF_URLS.sub(lambda found: "***@" if found[0].endswith("@") else "***", value)
        case dict():
            return {redacted(key): redacted(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(redacted(item) for item in value)
        case _:
            return value


def print_error(error: BaseException | str) -> None:
    """Prints an error's message to standard error, also where it names an argument that is no UTF-8."""
    print(redacted(str(error)).encode(errors="backslashreplace").decode(), file=sys.stderr)


def is_url(place: str | Path) -> bool:
    """Whether a place is written as a URL, of a known kind or not. s3:/bucket and pipe:ls count as URLs too, since
    nobody means a folder by them."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/|.*://|pipe:", str(place)))


def plain_place(place: Any) -> Any:
    """A path or URL in its plain form: a/b for ./a//b/, the home folder for ~, a URL without slashes at its end. What
    is no place stays as it is."""
    if not place or not isinstance(place, str | Path):
        return place
    return re.sub("(?<=[^:/])/+$", "", str(place)) if is_url(place) else str(Path(os.path.expanduser(place)))


Place = Annotated[T, BeforeValidator(plain_place)]
"""A recipe's field that names a path or URL: Place[str], or Place[str | None]."""


def local_path(text: str) -> Path:
    """For argparse: a place that must be on this machine. Path alone would make a folder s3: of s3://bucket."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"found {redacted(text)}; needed: a path of this machine, not a URL")
    return Path(plain_place(text))


def open_filesystem(url: str | Path) -> tuple[AbstractFileSystem, str]:
    """The file system that fsspec has for a path or URL, and the path in it. PlaceError if it has none."""
    if "://***@" in str(url) or str(url).partition("?")[2].startswith("***"):
        raise PlaceError(
            f"{url} has *** where a password or a signature was, which no file keeps: give the whole URL again, as by "
            "data.shards=..., or a copy on this machine"
        )
    try:
        return fsspec.url_to_fs(str(url))
    except (ImportError, ValueError) as error:  # a package is missing, or the protocol is unknown
        raise PlaceError(redacted(f"{url} cannot be opened: {error}")) from error


def is_local(url: str | Path) -> bool:
    """Whether a path or URL is on this machine's file system."""
    return isinstance(open_filesystem(url)[0], LocalFileSystem)


def with_retries(operation: Callable[[], T], what: str) -> T:
    """The operation's result; a failure is tried again with growing waits, since a store may fail for a moment.

    An error that waiting does not mend, such as a missing object or a refused key, is raised at once. So are PlaceError
    for a missing key, and StoreError for a store that was never in reach. After the last try StoreError has the
    failure. Each message begins with `what`.
    """
    global _store_has_answered
    for wait_seconds in (*_WAIT_SECONDS, None):
        try:
            result = operation()
            _store_has_answered = True
            return result
        except _PERMANENT as error:
            if not isinstance(error, OSError):
                raise
            # A class of our own: a library's may take other arguments, as aiohttp's for a certificate that it refuses.
            error_class = next((refusal for refusal in _REFUSALS if isinstance(error, refusal)), PlaceError)
            raise error_class(redacted(f"{what}: {error.strerror or str(error) or type(error).__name__}")) from error
        except Exception as error:
            if needed := _missing(error):
                error_class, words = needed
                raise error_class(redacted(f"{what}: {error}; {words}")) from error
            if wait_seconds is None:
                found = f"{what} failed {len(_WAIT_SECONDS) + 1} times, at last with {error!r}"
                raise StoreError(redacted(found)) from error
            log.info("%s; trying again in %s s", redacted(f"{what} failed with {error!r}"), wait_seconds)
            time.sleep(wait_seconds)
    raise AssertionError


def _missing(error: BaseException | None) -> tuple[type[OSError], str] | None:
    """The error to raise and what the user must do, if a store cannot be used at all; None if the failure may pass."""
    while error:
        if "Credentials" in type(error).__name__:
            return (
                PlaceError,
                "give the store's key in the environment, for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        is_unreachable = isinstance(error, socket.gaierror) or getattr(error, "errno", None) in _UNREACHABLE
        if is_unreachable and not _store_has_answered:
            return StoreError, "check that this machine has a network, and the store's address, for S3 AWS_ENDPOINT_URL"
        error = error.__cause__ or error.__context__
    return None


def read_file(url: str | Path) -> bytes:
    """The content of a file. FileNotFoundError if there is none; PlaceError for a pipe or a device, which may never
    end."""
    filesystem, path = open_filesystem(url)
    if not isinstance(filesystem, LocalFileSystem):
        return with_retries(lambda: filesystem.cat_file(path), f"reading {url}")
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):
        raise PlaceError(f"{path} is a pipe or a device; needed: an ordinary file")
    return Path(path).read_bytes()


def read_json(url: str | Path) -> Any:
    """`parse_json` of a file. Raises as `read_file` too."""
    return parse_json(read_file(url), str(url))


def read_json_if_there(url: str | Path) -> Any:
    """`read_json`, or None if there is no such file."""
    try:
        return read_json(url)
    except FileNotFoundError:
        return None


def parse_json(text: str | bytes, place: str) -> Any:
    """The value of a JSON text that may be damaged or hostile. InputError names its `place`, such as a file's line."""
    try:
        return usable(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(redacted(f"{place} is damaged ({error}): mend or remove it")) from None


def usable(value: T) -> T:
    """What a reader of JSON or YAML returned, or ValueError for what the code behind the reader would fail at.

    That is more levels than MOST_LEVELS, integers beyond a float's range, and halves of surrogate pairs, which UTF-8
    does not have.
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        try:
            level = [part for of_level in level for part in _parts(of_level)]
        except OverflowError as error:
            raise ValueError(str(error)) from None
    if level:
        raise ValueError(f"it has more than {MOST_LEVELS} levels")
    return value


def _parts(value: Any) -> Iterable[Any]:
    """The values in a value. Raises ValueError or OverflowError for a text or number that cannot be used."""
    match value:
        case dict():
            return (*value, *value.values())
        case list():
            return value
        case str():
            value.encode()
        case int():
            float(value)
    return ()


def create_file(url: str | Path, content: bytes) -> None:
    """Write a file that does not exist yet. If several processes try at once, one succeeds.

    The others get FileExistsError. Local files, S3 and Google Cloud Storage guarantee this; other stores may not.
    """
    filesystem, path = open_filesystem(url)
    if isinstance(filesystem, LocalFileSystem):
        temporary = _write_temporary(Path(path), content)
        try:
            os.link(temporary, path)
        finally:
            temporary.unlink()
        return
    try:
        with_retries(lambda: filesystem.pipe_file(path, content, mode="create"), f"creating {url}")
    except FileExistsError:
        if read_file(url) != content:  # equal content: an earlier try of ours succeeded and its answer was lost
            raise


def write_file(url: str | Path, content: bytes) -> None:
    """Write a file so that it appears under its name only when whole.

    A local file is written under a temporary name, fsynced and renamed; an object store's put is whole by itself. A
    device or a pipe, such as /dev/stdout, is written to.
    """
    filesystem, path = open_filesystem(url)
    if not isinstance(filesystem, LocalFileSystem):
        with_retries(lambda: filesystem.pipe_file(path, content), f"writing {url}")
        return
    file = Path(path).resolve()
    if not file.is_file() and Path(path).exists():
        Path(path).write_bytes(content)
        return
    temporary = _write_temporary(file, content)
    # Opened before the rename: whoever waits for this file may then move the folder on.
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.replace(temporary, file)
        os.fsync(directory)
    finally:
        os.close(directory)


def write_text(url: str | Path, text: str) -> None:
    """`write_file` of a text, in UTF-8."""
    write_file(url, text.encode())


def sealed(body: str) -> str:
    """A JSON object's text, with the text's checksum added as the last field."""
    return f'{body[:-1]}, "xxh3_128": "{xxhash.xxh3_128_hexdigest(body.encode())}"}}'


def check_seal(text: str) -> None:
    """Raises ValueError unless `sealed` made `text`."""
    body, _, seal = text.rpartition(", ")
    if not seal.startswith('"xxh3_128": '):
        raise ValueError(f"it ends with {seal[:12]!r}..., where it should have an xxh3_128 checksum")
    if sealed(body + "}") != text:
        raise ValueError("its own checksum does not hold")


def list_files(url: str) -> list[str]:
    """The files in a folder and all folders within, by their path in it; none if there is no folder."""
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    paths = with_retries(lambda: filesystem.find(path), f"listing {url}")
    filesystem.invalidate_cache()  # or it would take files that come later for absent
    return sorted(found.removeprefix(f"{path}/") for found in paths)


def upload_file(source: Path, url: str) -> None:
    """Copy a local file to a store, a large one in parts. It appears there only when whole."""
    filesystem, path = open_filesystem(url)
    with_retries(lambda: filesystem.put_file(str(source), path), f"writing {url}")


def download_file(url: str, target: Path) -> None:
    """Copy a store's file here. FileNotFoundError if there is none."""
    filesystem, path = open_filesystem(url)

    def download() -> None:
        filesystem.get_file(path, str(target))
        found, needed = target.stat().st_size, filesystem.size(path)
        if found < needed:
            raise OSError(f"{found} of {needed} bytes arrived")

    with_retries(download, f"reading {url}")


def delete_file(url: str) -> None:
    """Delete a store's file. One that is gone already is no error."""
    filesystem, path = open_filesystem(url)
    with suppress(FileNotFoundError):
        with_retries(lambda: filesystem.rm_file(path), f"deleting {url}")


def _write_temporary(target: Path, content: bytes) -> Path:
    """Write and fsync a file beside `target`, under a name that no other process uses.

    On a full disk it leaves nothing, and raises an OSError that names `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(target)) from error
    return temporary
