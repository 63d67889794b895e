"""Finding input files by glob or URL and opening one: on the disk or in a store, plain or compressed."""

import glob
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

import zstandard
from braceexpand import braceexpand
from fsspec.implementations.local import LocalFileSystem
from isal import isal_zlib

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import open_filesystem, with_retries

_SUFFIXES = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".tsv": "table",
    ".tar": "tar",
}

_CHUNK_BYTES = 1 << 12  # compressed bytes that are decompressed at a time: in .zst 4 bytes can hold 128 KiB
_BUFFER_BYTES = 1 << 15
_BLOCK_BYTES = 8 << 20  # bytes that are fetched from a store at a time


@dataclass(frozen=True)
class InputFile:
    url: str
    num_bytes: int
    """The size as stored, so compressed where the file is."""

    @property
    def name(self) -> str:
        """The URL without its query, which may be a signature."""
        return self.url.partition("?")[0] if "://" in self.url else self.url

    @property
    def kind(self) -> str | None:
        """json, parquet, text, table or tar, by the name's ending."""
        stem = self.name.removesuffix(".gz").removesuffix(".zst")
        return next((kind for suffix, kind in _SUFFIXES.items() if stem.endswith(suffix)), None)


class BadFileError(InputError):
    """A file ends too early or is damaged."""

    def __init__(self, file: InputFile, bytes_read: int, reason: str):
        super().__init__(file, bytes_read, reason)  # all of them, so that the error comes whole from another process
        self.file = file
        self.bytes_read = bytes_read
        """The stored bytes before the fault."""
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file.url} is broken after {self.bytes_read:,} of {self.file.num_bytes:,} bytes: {self.reason}"


def find_inputs(sources: Iterable[str], option: str = "--input") -> list[InputFile]:
    """The files of the globs and URLs, those of each source sorted by name. part-{000..127}.tar names 128 files.

    Raises InputError if a source matches no file, a file's format is not read, or a file is named twice. A table (.tsv)
    is read for --decontaminate alone.
    """
    found = []
    for source in sources:
        try:
            for name in braceexpand(source) if re.search(r"\{\w+\.\.\w+\}", source) else [source]:
                found += _files_of(name, option)
        except (InputError, OSError):
            raise
        except ValueError as error:  # from braceexpand, fsspec or a store
            raise InputError(f"{option} {source} is not understood: {error}") from error
    for name, count in Counter(file.url for file in found).items():
        if count > 1:
            raise InputError(f"{option} names {name} twice")
    return found


def _files_of(source: str, option: str) -> list[InputFile]:
    filesystem, pattern = open_filesystem(source)

    def look() -> dict[str, dict]:
        if "[" in pattern and filesystem.exists(pattern):  # a name with a bracket, which glob takes for a choice
            return {pattern: filesystem.info(pattern)}
        return filesystem.glob(pattern, detail=True)

    matches = with_retries(look, f"listing {source}")
    urls = {path: filesystem.unstrip_protocol(path).removeprefix("file://") for path in sorted(matches)}
    files = [InputFile(url, matches[path]["size"]) for path, url in urls.items() if matches[path]["type"] == "file"]
    folders = [url for path, url in urls.items() if matches[path]["type"] == "directory"]
    if not files and folders:
        raise InputError(f"{option} {source}: {folders[0]} is a folder: give '{glob.escape(folders[0])}/*.jsonl.gz'")
    if not files:
        hint = "; in a glob [[] stands for a bracket in a name" if "[" in source else ""
        raise InputError(f"{option} {source} matches no file{hint}")
    # A table's labels must not become text to train on; texts to look for may stand beside labels.
    readable = {suffix: kind for suffix, kind in _SUFFIXES.items() if kind != "table" or option == "--decontaminate"}
    unreadable = [file.url for file in files if file.kind not in readable.values()]
    if unreadable:
        raise InputError(
            f"{option} {source} matches {unreadable[0]}, whose format it does not read; readable are "
            f"{', '.join(readable)}, all but Parquet also with .gz or .zst after it. Write a table's texts as JSON "
            'lines: {"text": "..."}'
        )
    return files


def open_input(file: InputFile) -> BinaryIO:
    """The stored bytes, from the disk or the store."""
    filesystem, path = open_filesystem(file.url)
    if isinstance(filesystem, LocalFileSystem):
        return open(path, "rb")
    remote = with_retries(lambda: filesystem.open(path, "rb", block_size=_BLOCK_BYTES), f"opening {file.url}")
    return io.BufferedReader(_RetriedFile(remote, file.url), _BLOCK_BYTES)


class _RetriedFile(io.RawIOBase):
    """A remote file that tries a read again when it fails."""

    def __init__(self, file: BinaryIO, url: str):
        self._file = file
        self._url = url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer) -> int:
        def read() -> bytes:
            content = self._file.read(len(buffer))
            if not content and self._file.tell() < self._file.size:
                raise OSError(f"it ended at byte {self._file.tell()} of {self._file.size}")
            return content

        content = with_retries(read, f"reading {self._url}")
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


class StrictTarInfo(tarfile.TarInfo):
    """Raises an error at a damaged or missing header after the first one; tarfile takes it for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive):
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError, tarfile.EmptyHeaderError) as error:
            raise tarfile.ReadError(str(error) or "it ends without the blocks of zeros that end an archive") from error


def decompressed(raw: BinaryIO, file: InputFile) -> BinaryIO:
    """The content of `raw`. Reading it raises BadFileError where the file is damaged or cut short."""
    if file.name.endswith(".gz"):
        frames = _Frames(raw, file, lambda: isal_zlib.decompressobj(wbits=31))  # a gzip header and trailer
    elif file.name.endswith(".zst"):
        frames = _Frames(raw, file, lambda: zstandard.ZstdDecompressor().decompressobj())
    else:
        return raw
    return io.BufferedReader(frames, _BUFFER_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses one frame or several in a row. BadFileError where one is damaged or the last one is cut short.

    It reads `raw` in small chunks, so the position in `raw` says how much of the file was used.
    """

    def __init__(self, raw: BinaryIO, file: InputFile, start_frame: Callable):
        self._raw = raw
        self._file = file
        self._start_frame = start_frame
        self._frame = start_frame()
        self._bytes_used = 0
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            compressed = self._raw.read(_CHUNK_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise BadFileError(self._file, self._bytes_used, "it ends in the middle of its compressed data")
                return 0
            try:
                self._output = memoryview(self._decompress(compressed))
            except (isal_zlib.error, zstandard.ZstdError) as error:
                raise BadFileError(self._file, self._bytes_used, str(error)) from error
            self._bytes_used += len(compressed)
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        parts = []
        while compressed:
            self._frame = self._frame or self._start_frame()
            parts.append(self._frame.decompress(compressed))
            compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
                compressed = compressed.lstrip(b"\0")  # padding, as after the members of some gzip files
        return b"".join(parts)
