"""Records of a task's data, from GLUE's TSV, JSONL, Parquet, SQuAD's JSON, or a name that `datasets` loads.

A record's `place` says where it stands in its source, for messages.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gmlp_scale.errors import InputError
from gmlp_scale.storage.damage import damage_as
from gmlp_scale.storage.files import parse_json

log = logging.getLogger(__name__)

MOST_SHOWN = 10
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SUFFIXES = (".tsv", ".json", ".jsonl", ".parquet")


class DataError(InputError):
    """Mistakes in a task's data, one per line, each with its place. The message has the first MOST_SHOWN."""

    def __init__(self, source: str, mistakes: list[str]):
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        more = [f"and {len(mistakes) - MOST_SHOWN} more"] if len(mistakes) > MOST_SHOWN else []
        super().__init__("\n  ".join([f"{source}: {count}", *mistakes[:MOST_SHOWN], *more]))


@dataclass(frozen=True)
class DataSet:
    """A published data set: its place on the Hugging Face hub, and the form of its TSV files."""

    name: str
    configuration: str
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"})
    """The name of its split for each of our parts."""
    glue_folder: str = ""
    """Its folder in GLUE's download, which names the predictions files too. Empty for a set that is not GLUE's."""
    tsv_columns: tuple[str, ...] = ()
    """The columns of TSV files without a header. A file of these sets has one if its first line names any of them."""
    train_has_broken_lines: bool = False
    """Whether training lines with another number of columns are left out, with a warning that counts them."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts besides train."""
        return tuple(part for part in self.splits if part != "train")


@dataclass(frozen=True)
class Record:
    place: str
    """Such as `line 7`."""
    fields: Mapping[str, Any]


def read_records(source: str, part: str, data_set: DataSet) -> Iterator[Record]:
    """The records of a file, or of a hub name or its copy in a folder, which `datasets` loads.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: its form is not known, or it is damaged.
    """
    if mistake := missing_file(source, part, data_set):
        raise FileNotFoundError(mistake)
    path = Path(source)
    if not path.is_file():
        return _read_hub(source, part, data_set)
    match path.suffix:
        case ".tsv":
            return _read_tsv(path, part, data_set)
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path)
        case ".json":
            return _read_squad_json(path)
    raise DataError(source, [f"has the suffix {path.suffix!r}; known are {', '.join(_SUFFIXES)}"])


def missing_file(source: str, part: str, data_set: DataSet) -> str | None:
    """The message for a source that is neither a file nor something that `datasets` loads. None if it is one."""
    path = Path(source)
    is_hub_name = not path.exists() and _HUB_NAME.fullmatch(source) and path.suffix not in _SUFFIXES
    if path.is_file() or path.is_dir() or is_hub_name:
        return None
    return f"data.{part}: {source} does not exist; give a file, or a hub name such as {data_set.name}"


def require_columns(source: str, record: Record, alternatives: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The first alternative whose columns are all in the record. DataError names the record's columns if there is
    none."""
    for columns in alternatives:
        if all(column in record.fields for column in columns):
            return columns
    wanted = " or ".join(" and ".join(columns) for columns in alternatives)
    raise DataError(source, [f"{record.place}: no column {wanted}; found {', '.join(record.fields)}"])


def text_mistake(place: str, column: str, value: Any) -> str | None:
    """What is wrong with a value that should be text; None if it is one."""
    return None if isinstance(value, str) else f"{place}: {column} is {value!r}, which is no text"


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers. Only a line feed ends a line: texts may hold other separators."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line := line.rstrip("\r\n"):
                    yield number, line
    except UnicodeDecodeError as error:
        raise DataError(str(path), [f"is not UTF-8 ({error.reason} at byte {error.start})"]) from None


def _read_tsv(path: Path, part: str, data_set: DataSet) -> Iterator[Record]:
    """Tab-separated values. Quotes mean nothing, as in GLUE's files."""
    columns, broken, last_number = (), [], 0
    for number, line in lines_of(path):
        values = line.split("\t")
        if len(columns) == 1 and number != last_number + 1:
            raise DataError(str(path), [f"line {number - 1} is empty: give the text, or take the line out"])
        last_number = number
        if not columns:
            has_header = not data_set.tsv_columns or not set(values).isdisjoint(data_set.tsv_columns)
            columns = tuple(values) if has_header else data_set.tsv_columns
            if has_header:
                _check_distinct(path, columns)
                continue
        if len(values) == len(columns):
            yield Record(f"line {number}", dict(zip(columns, values, strict=True)))
            continue
        broken.append(f"line {number}: found {len(values)} columns; needed {len(columns)}: {', '.join(columns)}")
        if part != "train" or not data_set.train_has_broken_lines:
            raise DataError(str(path), broken)
    if broken:
        log.warning("%s: %d broken lines were left out; first %s", path, len(broken), broken[0])


def _check_distinct(path: Path, columns: Sequence[str]) -> None:
    """Raises DataError if a column stands in the table twice: which of them counts would be a guess."""
    if repeated := [column for column, count in Counter(columns).items() if count > 1]:
        raise DataError(str(path), [f"column {column} stands there twice: leave one out" for column in repeated])


def _read_jsonl(path: Path) -> Iterator[Record]:
    for number, line in lines_of(path):
        try:
            fields = parse_json(line, f"line {number}")
        except InputError as error:
            raise DataError(str(path), [str(error)]) from None
        if not isinstance(fields, dict):
            raise DataError(str(path), [f"line {number}: found {type(fields).__name__}; a line holds an object"])
        yield Record(f"line {number}", fields)


def _read_parquet(path: Path) -> Iterator[Record]:
    from pyarrow.parquet import ParquetFile

    with damage_as(lambda reason: DataError(str(path), [f"is not Parquet, or is damaged ({reason})"])):
        file = ParquetFile(path, page_checksum_verification=True)
        _check_distinct(path, file.schema_arrow.names)
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        yield from (Record(f"row {number}", fields) for number, fields in enumerate(rows, start=1))


def _read_hub(source: str, part: str, data_set: DataSet) -> Iterator[Record]:
    import datasets

    configuration, split = data_set.configuration, data_set.splits[part]
    try:
        rows = datasets.load_dataset(source, configuration, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        found = f"datasets cannot load {configuration} split {split}: {' '.join(str(error).split())}"
        where = (
            "" if Path(source).exists() else f". Nor is there such a file here; a file ends in {', '.join(_SUFFIXES)}"
        )
        raise DataError(source, [f"{found}{where}"]) from error
    yield from (Record(f"{split} row {number}", fields) for number, fields in enumerate(rows, start=1))


def _read_squad_json(path: Path) -> Iterator[Record]:
    """SQuAD's questions, which stand in paragraphs of articles, as the flat records that `datasets` gives."""
    try:
        articles = parse_json(path.read_bytes(), "the file")["data"]
        for article in articles:
            for number, paragraph in enumerate(article["paragraphs"], start=1):
                for question in paragraph["qas"]:
                    place = f"{article.get('title', '')!r} paragraph {number} question {question.get('id')}"
                    fields = {"context": paragraph["context"], **question}
                    if question.get("is_impossible"):
                        fields["answers"] = []
                    if isinstance(answers := fields.get("answers"), list):
                        columns = ("text", "answer_start")
                        fields["answers"] = {column: [answer[column] for answer in answers] for column in columns}
                    yield Record(place, fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        form = "SQuAD's JSON (data, paragraphs, context, qas, answers)"
        raise DataError(str(path), [f"is not {form}: {error!r}"]) from None
