"""Finding and reading input files: JSON lines, Parquet, text and webdataset's tar files, by glob or URL.

A UTF-8 byte-order mark, as some Windows programs write at a file's start, is no part of a text.
A record that cannot be read comes out as a BadRecord with its place, never as an exception, and is never left out.
A file that ends too early or is damaged raises BadFileError after the records that could be read.
"""

import codecs
import glob
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import orjson
from braceexpand import braceexpand

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.open_input import SUFFIXES, BadFileError, InputFile, decompressed, open_input, parquet_faults
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
    readable = {suffix: kind for suffix, kind in SUFFIXES.items() if kind != "table" or option == "--decontaminate"}
    unreadable = [file.url for file in files if file.kind not in readable.values()]
    if unreadable:
        raise InputError(
            f"{option} {source} matches {unreadable[0]}, whose format it does not read; readable are "
            f"{', '.join(readable)}, all but Parquet also with .gz or .zst after it. Write a table's texts as JSON "
            'lines: {"text": "..."}'
        )
    return files


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
        contents = {
            "json": self._json_lines,
            "parquet": self._parquet_rows,
            "text": self._text_parts,
            "table": self._text_parts,
            "tar": self._tar_members,
        }[self._file.kind]
        with open_input(self._file) as self._raw:
            for line, (content, text_of) in enumerate(contents(self._raw), start=1):
                if text_of and line % self._num_parts == self._part:
                    yield self._record(line, content, text_of)

    def _record(self, line: int, content: object, text_of: Callable[[object], str]) -> Record | BadRecord:
        """The record with the content's text; a BadRecord where the content is too long or `text_of` refuses it."""
        has_limit = isinstance(content, bytes | str) and self._file.kind not in ("text", "table")
        try:
            if has_limit and len(content) > self._max_record_bytes:
                raise ValueError("too long")
            return Record(text_of(content), line)
        except UnicodeDecodeError:
            reason = "invalid UTF-8"
        except ValueError as error:
            reason = str(error)
        excerpt = content[:100].decode(errors="replace") if isinstance(content, bytes) else str(content)[:100]
        return BadRecord(line, reason, excerpt)

    def _json_lines(self, raw: BinaryIO) -> Iterator[tuple[bytes, Callable | None]]:
        """Each line. A blank line counts as one and is no record."""
        file = decompressed(raw, self._file)
        while content := file.readline(self._max_record_bytes + 1):
            is_long = len(content) > self._max_record_bytes
            rest = content if is_long else b"\n"
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(1 << 20)
            yield content, self._text_of_json if is_long or not content.isspace() else None

    def _text_of_json(self, content: bytes) -> str:
        try:
            document = orjson.loads(content.removeprefix(codecs.BOM_UTF8))
        except orjson.JSONDecodeError as error:
            content.decode()  # raises UnicodeDecodeError where this is the fault
            raise ValueError("broken JSON") from error
        return self._text_of_value(document.get(self._text_field) if isinstance(document, dict) else None)

    def _text_of_value(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"no text in field {self._text_field!r}")
        return value

    def _parquet_rows(self, raw: BinaryIO) -> Iterator[tuple[object, Callable]]:
        from pyarrow.parquet import ParquetFile

        num_read, self._fraction_read = 0, 0.0
        with parquet_faults(lambda reason: BadFileError(self._file, self.bytes_read, reason)):
            table = ParquetFile(raw, page_checksum_verification=True)
            names = table.schema_arrow.names
            if self._text_field not in names:
                raise InputError(
                    f"{self._file.url} has no column {self._text_field!r}; it has {', '.join(names)}: choose one with "
                    "--text-field"
                )
            for batch in table.iter_batches(batch_size=256, columns=[self._text_field]):
                for value in batch.column(0).to_pylist():
                    num_read += 1
                    self._fraction_read = num_read / table.metadata.num_rows
                    yield value, self._text_of_value

    def _text_parts(self, raw: BinaryIO) -> Iterator[tuple[bytes, Callable]]:
        """The whole text, or parts of it that end at the end of a line. Line ends such as \\r\\n stay as they are.

        A line of more than max_record_bytes is cut too, between two characters.
        """
        file = decompressed(raw, self._file)
        while part := bytearray(file.readline(self._max_record_bytes)):
            while len(part) < _TEXT_PART_BYTES and (content := file.readline(self._max_record_bytes)):
                part += content
            while not part.endswith(b"\n") and b"\x80" <= file.peek(1)[:1] < b"\xc0":  # the rest of a character
                part += file.read(1)
            yield bytes(part), _decoded

    def _tar_members(self, raw: BinaryIO) -> Iterator[tuple[bytes, Callable]]:
        """Each .txt or .json is a record, and so is each line of a .jsonl."""
        for ending, content in text_members(decompressed(raw, self._file), raw, self._file, self._max_record_bytes):
            for text in filter(bytes.strip, content.split(b"\n")) if ending == ".jsonl" else [content]:
                yield text, _decoded if ending == ".txt" else self._text_of_json


def _decoded(content: bytes) -> str:
    return content.decode("utf-8-sig")


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
