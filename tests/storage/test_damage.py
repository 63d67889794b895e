"""Files that a library reads and finds damaged: each of their readers has one error for that, which names the file."""

import gzip
import json
import random
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gmlp_scale.errors import InputError
from gmlp_scale.prepare import image_sources
from gmlp_scale.prepare.input_files import InputFile
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_documents import read_documents
from gmlp_scale.prepare.read_records import FileReader
from gmlp_scale.tasks import records
from gmlp_scale.tasks.table import TASKS

COLUMNS = {
    "text": [f"{number} {number**9}" for number in range(2000)],
    "image": [random.Random(number).randbytes(30) for number in range(2000)],
    "label": [number % 7 for number in range(2000)],
}


def of_corpus(path: Path) -> list:
    file = InputFile(str(path), path.stat().st_size)
    return [record.text for record in FileReader(file, text_field="text", max_record_bytes=1000)]


def of_images(path: Path) -> list:
    image_sources._row_group.cache_clear()
    source = image_sources.open_source(str(path))
    return [(source.read(ref), ref.label) for ref in source.images]


def of_task(path: Path) -> list:
    return [record.fields for record in records.read_records(str(path), "train", TASKS["sst2"].data_set)]


@pytest.mark.parametrize("compression", ["snappy", "none"])
@pytest.mark.parametrize("read", [of_corpus, of_images, of_task])
def test_parquet_with_a_page_overwritten_is_damaged_for_every_reader(read, compression, tmp_path, trials):
    path, draw = tmp_path / "a.parquet", random.Random(0)
    pq.write_table(pa.table(COLUMNS), path, row_group_size=500, compression=compression, write_page_checksum=True)
    whole, expected, num_found = path.read_bytes(), read(path), 0
    for _ in range(60):
        place, size = draw.randrange(len(whole)), draw.choice([8, 500, 3000])
        path.write_bytes((whole[:place] + draw.choice([bytes(size), draw.randbytes(size)]))[: len(whole)])
        with path.open("ab") as file:
            file.write(whole[path.stat().st_size :])
        try:
            assert read(path) == expected  # a column that nobody reads
        except InputError as error:
            num_found += 1
            assert str(path) in str(error)
    assert num_found > 25
    trials("corpus files cut or damaged", 60)


LINES = "".join(json.dumps({"text": text}) + "\n" for text in COLUMNS["text"]).encode()


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:9000], ": Compressed file ended before"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-8] + bytes(8), ": CRC check failed"),
        ("a.jsonl.gz", b"", ": it is empty or cut short"),
        ("a.jsonl", LINES + b'{"text": \n', "after .* rows: "),
        ("a.jsonl", LINES + b'{"text": "caf\xe9"}\n', "codec can't decode byte 0xe9"),
        ("a.parquet", b"text" * 100, ": Parquet magic bytes not found"),
    ],
    ids=["cut", "checksum", "empty", "no JSON", "no UTF-8", "no Parquet"],
)
def test_a_damaged_file_of_a_hub_data_set_is_named_by_the_set_and_the_row(name, content, found, tmp_path, trials):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    source = f"hf:{tmp_path}/corpus:default:train"
    options = JobOptions(input=(source,), tokenizer="x", sequence_length=8, output=str(tmp_path / "out"))
    read = partial(read_documents, options, "tokenizing", None, 0, 1)
    with pytest.raises(InputError, match=rf"--input {source}.*{found}"):
        list(read())
    trials("corpus files cut or damaged", 1)
