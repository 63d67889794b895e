"""Finding and reading input files: JSON lines, Parquet, text and webdataset's tar files, by glob or URL.

A UTF-8 byte-order mark, as some Windows programs write at a file's start, is no part of a text.
A record that cannot be read comes out as a BadRecord with its place, never as an exception, and is never left out.
A file that ends too early or is damaged raises BadFileError after the records that could be read.
"""

import codecs
import glob
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import orjson
from braceexpand import braceexpand

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.open_input import SUFFIXES, BadFileError, InputFile, decompressed, open_input
from gmlp_scale.prepare.tar_members import text_members
from gmlp_scale.storage.files import open_filesystem, with_retries

_TEXT_PART_BYTES = 1_000_000


@dataclass(frozen=True)
class Record:
    text: str
    line: int
    """The number of the line, counted from 1; in a Parquet file the row's, in a text file the part's, in a tar file the
    text's."""


@dataclass(frozen=True)
class BadRecord:
    line: int
    reason: str
    excerpt: str
    """The record's beginning."""


def find_inputs(sources: Iterable[str], option: str = "--input") -> list[InputFile]:
    """The files of the globs and URLs, those of each source sorted by name. part-{000..127}.tar names 128 files.

    Raises InputError if a source matches no file, a file's format is not read, or a file is named twice. A table (.tsv)
    is read for --decontaminate alone.
    """
    found = []
    for source in sources:
        try:
            for name in _spelled_out(source):
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
    readable = {suffix: kind for suffix, kind in SUFFIXES.items() if kind != "table" or option == "--decontaminate"}
    unreadable = [file.url for file in files if file.kind not in readable.values()]
    if unreadable:
        raise InputError(
            f"{option} {source} matches {unreadable[0]}, whose format it does not read; readable are "
            f"{', '.join(readable)}, all but Parquet also with .gz or .zst after it. Write a table's texts as JSON "
            'lines: {"text": "..."}'
        )
    return files


def _spelled_out(source: str) -> Iterator[str]:
    """The names that {000..127} stands for, in a source that has one."""
    return braceexpand(source) if re.search(r"\{\w+\.\.\w+\}", source) else iter([source])


class FileReader:
    """Reads one input file; `bytes_read` is how many stored bytes it has read. BadFileError where the file is broken.

    part, num_parts: the parts take the records in turn, and this reader takes those of `part`.
    """

    def __init__(self, file: InputFile, *, text_field: str, max_record_bytes: int, part: int = 0, num_parts: int = 1):
        self._file = file
        self._text_field = text_field
        self._max_record_bytes = max_record_bytes
        self._part = part
        self._num_parts = num_parts
        self._raw: BinaryIO | None = None
        self._fraction_read: float | None = None  # of a Parquet file's rows: its columns are not read in their order

    @property
    def bytes_read(self) -> int:
        if self._fraction_read is not None:
            return int(self._file.num_bytes * self._fraction_read)
        return self._raw.tell() if self._raw and not self._raw.closed else 0

    def __iter__(self) -> Iterator[Record | BadRecord]:
        read = {
            "json": self._json_lines,
            "parquet": self._parquet_rows,
            "text": self._text_parts,
            "table": self._text_parts,
            "tar": self._tar_members,
        }[self._file.kind]
        with open_input(self._file) as self._raw:
            yield from read(self._raw)

    def _is_own(self, line: int) -> bool:
        return line % self._num_parts == self._part

    def _json_lines(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        file = decompressed(raw, self._file)
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
            document = orjson.loads(content.removeprefix(codecs.BOM_UTF8))
        except orjson.JSONDecodeError:
            return BadRecord(line, "broken JSON" if _is_utf8(content) else "invalid UTF-8", _excerpt(content))
        text = document.get(self._text_field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            return BadRecord(line, f"no text in field {self._text_field!r}", _excerpt(content))
        return Record(text, line)

    def _parquet_rows(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        import pyarrow
        import pyarrow.parquet

        line, self._fraction_read = 0, 0.0
        try:
            table = pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True)
            names = table.schema_arrow.names
            if self._text_field not in names:
                raise InputError(
                    f"{self._file.url} has no column {self._text_field!r}; it has {', '.join(names)}: choose one with "
                    "--text-field"
                )
            for batch in table.iter_batches(batch_size=256, columns=[self._text_field]):
                for text in batch.column(0).to_pylist():
                    line += 1
                    self._fraction_read = line / table.metadata.num_rows
                    if self._is_own(line):
                        yield self._check_value(text, line)
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if isinstance(error, OSError) and (type(error) is not OSError or error.errno):
                raise  # from the disk or the store; for a damaged page pyarrow raises an OSError without a number
            raise BadFileError(self._file, self.bytes_read, str(error)) from error

    def _check_value(self, text: object, line: int) -> Record | BadRecord:
        if not isinstance(text, str):
            return BadRecord(line, f"no text in field {self._text_field!r}", repr(text)[:100])
        if len(text) > self._max_record_bytes:
            return BadRecord(line, "too long", text[:100])
        return Record(text, line)

    def _text_parts(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        """The whole text, or parts of it that end at the end of a line. Line ends such as \\r\\n stay as they are.

        A line of more than max_record_bytes is cut too, between two characters.
        """
        file = decompressed(raw, self._file)
        lines = iter(lambda: file.readline(self._max_record_bytes), b"")
        for number in itertools.count(1):
            part = bytearray()
            for content in lines:
                part += content
                if len(part) >= _TEXT_PART_BYTES:
                    break
            while not part.endswith(b"\n") and b"\x80" <= file.peek(1)[:1] < b"\xc0":  # the rest of a character
                part += file.read(1)
            if not part:
                return
            if self._is_own(number):
                yield self._decode(bytes(part), number)

    def _tar_members(self, raw: BinaryIO) -> Iterator[Record | BadRecord]:
        """Each .txt or .json is a record, and so is each line of a .jsonl."""
        line = 0
        for ending, content in text_members(decompressed(raw, self._file), raw, self._file, self._max_record_bytes):
            for text in filter(bytes.strip, content.split(b"\n")) if ending == ".jsonl" else [content]:
                line += 1
                if self._is_own(line):
                    yield self._check_text(text, line, ending)

    def _check_text(self, content: bytes, line: int, ending: str) -> Record | BadRecord:
        if len(content) > self._max_record_bytes:
            return BadRecord(line, "too long", _excerpt(content))
        return self._decode(content, line) if ending == ".txt" else self._parse(content, line)

    def _decode(self, content: bytes, line: int) -> Record | BadRecord:
        try:
            return Record(content.decode("utf-8-sig"), line)
        except UnicodeDecodeError:
            return BadRecord(line, "invalid UTF-8", _excerpt(content))


def records_before_fault(reader: FileReader, bad_files: list[dict], max_bad_files: int) -> Iterator[Record | BadRecord]:
    """The reader's records. If its file is broken they end there, and the file is added to `bad_files`.

    Raises InputError where these are now more than allowed.
    """
    try:
        yield from reader
    except BadFileError as error:
        counts = {"bytes_read": error.bytes_read, "bytes_lost": error.file.num_bytes - error.bytes_read}
        bad_files.append({"file": error.file.url, "reason": error.reason, **counts})
        check_bad_files(bad_files, max_bad_files)


def check_bad_files(bad_files: list[dict], max_bad_files: int) -> None:
    """Raise InputError where more files are broken than allowed."""
    if len(bad_files) > max_bad_files:
        found = "; ".join(
            f"{bad['file']} after {bad['bytes_read']:,} of {bad['bytes_read'] + bad['bytes_lost']:,} bytes "
            f"({bad['reason']})"
            for bad in bad_files[:3]
        )
        raise InputError(
            f"broken files: {len(bad_files)}, --max-bad-files is {max_bad_files}: {found}. Fetch them again (a job "
            "that has begun then needs another --output), or raise --max-bad-files to do without the rest of each"
        )


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _excerpt(content: bytes) -> str:
    return content[:100].decode(errors="replace")
