"""Where examples come from: TSV as GLUE publishes it, JSONL, Parquet, SQuAD's JSON, or a name that `datasets` loads.

Each gives records, whose `place` says where one stands so that a message can name it.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_TOLD = 10
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SUFFIXES = (".tsv", ".json", ".jsonl", ".parquet")


class DataError(ValueError):
    """Mistakes in a task's data, one a line, each with its place."""

    def __init__(self, source: str, mistakes: list[str]):
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        told = mistakes[:MOST_TOLD] + ([f"and {len(mistakes) - MOST_TOLD} more"] if len(mistakes) > MOST_TOLD else [])
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {mistake}" for mistake in told))


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub: its configuration, and its split for each part of ours."""

    name: str
    configuration: str
    splits: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    place: str
    """Such as `line 7`, within the source."""
    fields: Mapping[str, Any]


def read_records(source: str, part: str, hub: Hub) -> Iterator[Record]:
    """The records of a file, or of a hub name or local folder that `datasets` loads (`hub` gives configuration, split).

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it is none of the known forms, or is damaged.
    """
    path = Path(source)
    if path.is_dir() or (not path.exists() and _HUB_NAME.fullmatch(source) and path.suffix not in _SUFFIXES):
        return _read_hub(source, part, hub)
    if not path.is_file():
        raise FileNotFoundError(f"data.{part}: {source} does not exist; give a file, or a hub name such as {hub.name}")
    match path.suffix:
        case ".tsv":
            return _read_tsv(path)
        case ".jsonl":
            return _read_jsonl(path)
        case ".parquet":
            return _read_parquet(path)
        case ".json":
            return _read_squad_json(path)
    raise DataError(source, [f"has the suffix {path.suffix!r}; known are {', '.join(_SUFFIXES)}"])


def require_columns(source: str, record: Record, alternatives: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The first of the alternatives whose columns the record has all. DataError names the wanted and the found."""
    for columns in alternatives:
        if all(column in record.fields for column in columns):
            return columns
    wanted = " or ".join(" and ".join(columns) for columns in alternatives)
    raise DataError(source, [f"{record.place}: no column {wanted}; found {', '.join(record.fields)}"])


def text_mistake(place: str, column: str, value: Any) -> str | None:
    """What is wrong with a value that should be text that can be tokenized; None if nothing is."""
    if not isinstance(value, str):
        return f"{place}: {column} is {value!r}, which is no text"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{place}: {column} has a lone surrogate at character {error.start}, which is no character"
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that end at a line feed alone: texts may hold other separators."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line := line.rstrip("\r\n"):
                    yield number, line
    except UnicodeDecodeError as error:
        raise DataError(str(path), [f"is not UTF-8 ({error.reason} at byte {error.start})"]) from None


def _read_tsv(path: Path) -> Iterator[Record]:
    """A header and rows, tab-separated; quotes mean nothing, as in GLUE's files."""
    lines = _lines(path)
    _, header = next(lines, (0, ""))
    columns = header.split("\t")
    for number, line in lines:
        values = line.split("\t")
        if len(values) != len(columns):
            raise DataError(str(path), [f"line {number}: {len(values)} columns; the header has {len(columns)}"])
        yield Record(f"line {number}", dict(zip(columns, values, strict=True)))


def _read_jsonl(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(str(path), [f"line {number}: is not JSON ({error})"]) from None
        if not isinstance(fields, dict):
            raise DataError(str(path), [f"line {number}: found {type(fields).__name__}; a line holds an object"])
        yield Record(f"line {number}", fields)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(str(path), [f"is not Parquet ({error})"]) from None
    rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
    for number, fields in enumerate(rows, start=1):
        yield Record(f"row {number}", fields)


def _read_hub(source: str, part: str, hub: Hub) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_dataset(source, hub.configuration, split=hub.splits[part])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        message = " ".join(str(error).split())
        raise DataError(
            source, [f"datasets cannot load {hub.configuration} split {hub.splits[part]}: {message}"]
        ) from error
    for number, fields in enumerate(rows, start=1):
        yield Record(f"{hub.splits[part]} row {number}", fields)


def _read_squad_json(path: Path) -> Iterator[Record]:
    """SQuAD's articles of paragraphs of questions, as the flat records that `datasets` has of them."""
    try:
        articles = json.loads(path.read_text(encoding="utf-8-sig"))["data"]
        for article in articles:
            for number, paragraph in enumerate(article["paragraphs"], start=1):
                for question in paragraph["qas"]:
                    place = f"{article.get('title', '')!r} paragraph {number} question {question.get('id')}"
                    fields = {"context": paragraph["context"], **question}
                    if question.get("is_impossible"):
                        fields["answers"] = []
                    if isinstance(answers := fields.get("answers"), list):
                        fields["answers"] = {
                            "text": [answer["text"] for answer in answers],
                            "answer_start": [answer["answer_start"] for answer in answers],
                        }
                    yield Record(place, fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            str(path), [f"is not SQuAD's JSON (data, paragraphs, context, qas, answers): {error!r}"]
        ) from None
