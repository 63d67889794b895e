"""Reading the records of input files: JSON lines, Parquet, text and webdataset's tar files.

A UTF-8 byte-order mark, as some Windows programs write at a file's start, is no part of a text.
A record that cannot be read comes out as a BadRecord with its place, never as an exception, and is never left out.
A file that ends too early or is damaged raises BadFileError after the records that could be read.
"""

import codecs
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import PurePosixPath
from typing import BinaryIO

import orjson

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import (
    BadFileError,
    InputFile,
    StrictTarInfo,
    decompressed,
    open_input,
)
from gmlp_scale.storage.damage import damage_as

_TEXT_PART_BYTES = 1_000_000
_TAR_ENDINGS = (".txt", ".json", ".jsonl")


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
        with damage_as(lambda reason: BadFileError(self._file, self.bytes_read, reason)):
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
        """The texts in a tar file as webdataset's users write it: members KEY.txt, KEY.json or KEY.jsonl.

        Every .txt is a document, every line of a .jsonl, and every .json but metadata: 0.json beside 0.txt, and
        0.meta.json beside 0.txt or 0.json. A name may have more dots, as v1.0.txt, and may come twice. Members with
        other endings, such as a picture, hold no text and are passed over. Nothing is extracted to disk.

        The texts come in the archive's order, except that the .json come last among neighbours with the same webdataset
        key, the name up to the first dot.
        """
        has_text = False
        try:
            with tarfile.open(fileobj=decompressed(raw, self._file), mode="r|", tarinfo=StrictTarInfo) as archive:
                members = _members_with_text(archive, self._max_record_bytes)
                samples = groupby(members, key=lambda member: (member[0].parent, member[0].name.partition(".")[0]))
                for ending, content in chain.from_iterable(_documents(sample) for _, sample in samples):
                    has_text = True
                    for text in filter(bytes.strip, content.split(b"\n")) if ending == ".jsonl" else [content]:
                        yield text, _decoded if ending == ".txt" else self._text_of_json
        except (tarfile.TarError, EOFError) as error:
            raise BadFileError(self._file, raw.tell(), str(error)) from error
        if not has_text:
            raise BadFileError(self._file, raw.tell(), f"no member of it ends in {', '.join(_TAR_ENDINGS)}")


def _decoded(content: bytes) -> str:
    return content.decode("utf-8-sig")


def _members_with_text(archive: tarfile.TarFile, max_bytes: int) -> Iterator[tuple[PurePosixPath, bytes]]:
    """(name, content) of every member with text: of a .jsonl all of it, of others at most max_bytes + 1 bytes."""
    for member in archive:
        name = PurePosixPath(member.name)
        if member.isreg() and name.suffix in _TAR_ENDINGS:
            num_bytes = -1 if name.suffix == ".jsonl" else max_bytes + 1
            yield name, archive.extractfile(member).read(num_bytes)


def _documents(sample: Iterable[tuple[PurePosixPath, bytes]]) -> Iterator[tuple[str, bytes]]:
    """(ending, content) without the metadata, of members with one key."""
    texts, jsons = set(), []
    for name, content in sample:
        if name.suffix == ".json":
            jsons.append((name.stem, content))
        else:
            texts.add(name.stem)
            yield name.suffix, content
    stems = texts.union(stem for stem, _ in jsons)
    for stem, content in jsons:
        shorter = (stem[:place] for place, character in enumerate(stem) if character == ".")
        if stem not in texts and stems.isdisjoint(shorter):
            yield ".json", content


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
