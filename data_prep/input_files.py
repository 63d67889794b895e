"""Finding and reading input files: JSON lines, Parquet and text, by glob or URL.

A record that cannot be read comes out as a BadRecord with its place, never as an exception, and is never left out.
"""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import orjson
import zstandard
from fsspec.implementations.local import LocalFileSystem
from isal import isal_zlib

from data_prep.job_folder import JobError
from gmlp_scale.files import open_filesystem, with_retries

_TEXT_DOCUMENT_CHARACTERS = 1_000_000
_CHUNK_BYTES = 1 << 15  # compressed bytes that are read and decompressed at a time
_BLOCK_BYTES = 8 << 20  # bytes that are fetched from a store at a time
_SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text", ".tsv": "text"}


@dataclass(frozen=True)
class InputFile:
    url: str
    num_bytes: int
    """The size as stored, so compressed where the file is."""

    @property
    def kind(self) -> str | None:
        """json, parquet or text, by the name's ending."""
        stem = self.url.removesuffix(".gz").removesuffix(".zst")
        return next((kind for suffix, kind in _SUFFIXES.items() if stem.endswith(suffix)), None)


@dataclass(frozen=True)
class Record:
    text: str
    line: int
    """The number of the line, counted from 1; in a Parquet file of the entry, in a text file of the part."""


@dataclass(frozen=True)
class BadRecord:
    line: int
    reason: str
    excerpt: str
    """The record's beginning."""


def find_inputs(sources: Iterable[str], option: str = "--input") -> list[InputFile]:
    """The files of the globs and URLs, each source's sorted by name. ValueError where a source matches none, a file's
    format is unknown, or a file is named twice."""
    found = []
    for source in sources:
        filesystem, pattern = open_filesystem(source)
        matches = with_retries(partial(filesystem.glob, pattern, detail=True), f"listing {source}")
        files = [
            InputFile(filesystem.unstrip_protocol(path).removeprefix("file://"), info["size"])
            for path, info in sorted(matches.items())
            if info["type"] == "file"
        ]
        if not files:
            raise ValueError(f"{option} {source} matches no file")
        unreadable = [file.url for file in files if file.kind is None]
        if unreadable:
            raise ValueError(
                f"{option} {source} matches {unreadable[0]}, whose format is unknown; readable are "
                f"{', '.join(_SUFFIXES)}, all but Parquet also with .gz or .zst after it"
            )
        found += files
    names = [file.url for file in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{option} names {name} twice")
    return found


class FileReader:
    """Reads one input file; `bytes_read` is how many stored bytes it has read.

    part, num_parts: the parts take the records in turn, and this reader takes those of `part`.
    """

    def __init__(self, file: InputFile, *, text_field: str, max_record_bytes: int, part: int = 0, num_parts: int = 1):
        self._file = file
        self._text_field = text_field
        self._max_record_bytes = max_record_bytes
        self._part = part
        self._num_parts = num_parts
        self._raw: BinaryIO | None = None

    @property
    def bytes_read(self) -> int:
        return self._raw.tell() if self._raw and not self._raw.closed else 0

    def __iter__(self) -> Iterator[Record | BadRecord]:
        read = {"json": self._json_lines, "parquet": self._parquet_rows, "text": self._text_parts}[self._file.kind]
        last_line = 0
        with _open(self._file.url) as self._raw:
            try:
                for record in read(self._raw):
                    last_line = record.line
                    yield record
            except (EOFError, isal_zlib.error, zstandard.ZstdError, CorruptFileError) as error:
                yield BadRecord(last_line + 1, "truncated or corrupt file", str(error))

    def _is_own(self, line: int) -> bool:
        return line % self._num_parts == self._part

    def _json_lines(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        file = _decompressed(raw, self._file.url)
        for line in itertools.count(1):
            content = file.readline(self._max_record_bytes + 1)
            if not content:
                return
            if len(content) > self._max_record_bytes:
                while not content.endswith(b"\n") and (more := file.readline(1 << 20)):
                    content = content[:100] + more[-1:]
                if self._is_own(line):
                    yield BadRecord(line, "too long", _excerpt(content))
            elif self._is_own(line) and not content.isspace():
                yield self._parse(content, line)

    def _parse(self, content: bytes, line: int) -> Record | BadRecord:
        try:
            document = orjson.loads(content)
        except orjson.JSONDecodeError:
            return BadRecord(line, "broken JSON" if _is_utf8(content) else "invalid UTF-8", _excerpt(content))
        text = document.get(self._text_field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            return BadRecord(line, f"no text in field {self._text_field!r}", _excerpt(content))
        return Record(text, line)

    def _parquet_rows(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        import pyarrow
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.ParquetFile(raw)
            names = table.schema_arrow.names
            if self._text_field not in names:
                raise JobError(
                    f"{self._file.url} has no column {self._text_field!r}; it has {', '.join(names)}: choose one with "
                    "--text-field"
                )
            line = 0
            for batch in table.iter_batches(batch_size=256, columns=[self._text_field]):
                for text in batch.column(0).to_pylist():
                    line += 1
                    if self._is_own(line):
                        yield self._check_value(text, line)
        except pyarrow.ArrowException as error:
            raise CorruptFileError(str(error)) from error

    def _check_value(self, text: object, line: int) -> Record | BadRecord:
        if not isinstance(text, str):
            return BadRecord(line, f"no text in field {self._text_field!r}", repr(text)[:100])
        if len(text) > self._max_record_bytes:
            return BadRecord(line, "too long", text[:100])
        return Record(text, line)

    def _text_parts(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        """The whole text, or parts of it that end at the end of a line. Line ends such as \\r\\n stay as they are."""
        file = _decompressed(raw, self._file.url)
        lines = iter(lambda: file.readline(self._max_record_bytes), b"")
        for number in itertools.count(1):
            part = bytearray()
            for content in lines:
                part += content
                if len(part) >= _TEXT_DOCUMENT_CHARACTERS:
                    break
            if not part:
                return
            if self._is_own(number):
                yield self._decode(bytes(part), number)

    def _decode(self, content: bytes, line: int) -> Record | BadRecord:
        try:
            return Record(content.decode(), line)
        except UnicodeDecodeError:
            return BadRecord(line, "invalid UTF-8", _excerpt(content))


class CorruptFileError(Exception):
    """A file ends too early or is broken."""


def _open(url: str) -> BinaryIO:
    filesystem, path = open_filesystem(url)
    if isinstance(filesystem, LocalFileSystem):
        return open(path, "rb")
    return io.BufferedReader(_RetriedFile(filesystem.open(path, "rb", block_size=_BLOCK_BYTES), url), _BLOCK_BYTES)


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

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer) -> int:
        content = with_retries(lambda: self._read(len(buffer)), f"reading {self._url}")
        buffer[: len(content)] = content
        return len(content)

    def _read(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        if not content and self._file.tell() < self._file.size:
            raise OSError(f"it ended at byte {self._file.tell()} of {self._file.size}")
        return content

    def close(self) -> None:
        self._file.close()
        super().close()


def _decompressed(raw: BinaryIO, url: str) -> BinaryIO:
    if url.endswith(".gz"):
        frames = _Frames(raw, lambda: isal_zlib.decompressobj(wbits=31))  # a gzip header and trailer
    elif url.endswith(".zst"):
        frames = _Frames(raw, lambda: zstandard.ZstdDecompressor().decompressobj())
    else:
        return raw
    return io.BufferedReader(frames, _CHUNK_BYTES)


class _Frames(io.RawIOBase):
    """Decompresses any number of frames one after the other. EOFError where the last one is cut short.

    It reads `raw` in small chunks, so the position in `raw` tells how much of the file was used.
    """

    def __init__(self, raw: BinaryIO, start_frame: Callable):
        self._raw = raw
        self._start_frame = start_frame
        self._frame = None
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._output:
            compressed = self._raw.read(_CHUNK_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("compressed file ended in the middle")
                return 0
            self._output = memoryview(self._decompress(compressed))
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


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _excerpt(content: bytes) -> str:
    return content[:100].decode(errors="replace")
