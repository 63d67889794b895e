"""The reading of documents: it ends early if too many records are bad, a store that fails once is asked again, and the
memory of a task does not grow with its input."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import find_inputs
from gmlp_scale.prepare.job import JobFolder, JobOptions
from gmlp_scale.prepare.read_documents import check_bad_records, read_documents
from gmlp_scale.prepare.read_records import FileReader, Record
from gmlp_scale.prepare.write_shards import write_shards
from gmlp_scale.storage.files import write_file
from tests.data_prep.corpora import make_texts

NUM_RECORDS = 30_000


@pytest.mark.parametrize("kind", ["files", "hub"])
def test_a_wrong_field_is_reported_before_all_is_read(kind, tmp_path):
    (tmp_path / "corpus").mkdir()
    lines = "".join(json.dumps({"url": "x", "text": f"text {number}"}) + "\n" for number in range(NUM_RECORDS))
    (tmp_path / "corpus/a.jsonl").write_text(lines)
    source = {"files": f"{tmp_path}/corpus/a.jsonl", "hub": f"hf:{tmp_path}/corpus:default:train"}[kind]
    options = JobOptions(
        input=(source,), tokenizer="x", sequence_length=8, output=str(tmp_path / "out"), text_field="body"
    )
    with pytest.raises(InputError, match=r"10000 of 10000 records are bad \(10000 no text in field 'body'\), "):
        list(read_documents(options, "tokenizing", None, 0, 1))


def test_a_value_of_the_hub_that_is_no_text_is_a_bad_record(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text('{"text": "good", "label": 0}\n{"text": "  ", "label": 1}\n')
    for field, bad in (("text", "1 of 2 records are bad (1 empty text)"), ("label", "(2 no text in field 'label')")):
        options = JobOptions(
            input=(f"hf:{tmp_path}/corpus:default:train",), tokenizer="x", sequence_length=8,
            output=str(tmp_path / field), text_field=field,
        )  # fmt: skip
        with pytest.raises(InputError, match=re.escape(bad)):
            list(read_documents(options, "tokenizing", None, 0, 1))
            check_bad_records(options, options.job.total_counts("read"), "")


@pytest.fixture
def fail_once(monkeypatch):
    """fail_once(name): the store's next call of this method fails."""
    monkeypatch.setattr("gmlp_scale.storage.files._WAIT_SECONDS", (0.0,))

    def set_up(name: str) -> None:
        method, failures = getattr(MemoryFileSystem, name), [ConnectionResetError("reset")]

        def fail_first(*arguments, **options):
            if failures:
                raise failures.pop()
            return method(*arguments, **options)

        monkeypatch.setattr(MemoryFileSystem, name, fail_first)

    yield set_up
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def test_a_job_begins_and_a_file_is_opened_though_the_store_fails_once(fail_once):
    fail_once("exists")
    job = JobFolder("memory://unsteady/out")
    with job.begun({"tasks": 1}):
        assert job.read("job.json") == {"tasks": 1}
    write_file("memory://unsteady/a.txt", b"text")
    (file,) = find_inputs(["memory://unsteady/a.txt"])
    fail_once("open")
    assert list(FileReader(file, text_field="text", max_record_bytes=10)) == [Record("text", 1)]


def run_task(corpus: str, tokenizer_dir: Path, output: Path) -> int:
    """Peak memory in bytes of a process that runs one task."""
    options = JobOptions(
        input=[corpus], tokenizer=str(tokenizer_dir), output=str(output), sequence_length=512, shard_bytes=1 << 20,
        max_bad_fraction=1.0,
    )  # fmt: skip
    write_shards(options, read_documents(options, "tokenizing", None, 0, 1), 0, 1)
    status = Path("/proc/self/status").read_text()  # getrusage gives the parent's peak where that is larger
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_memory_stays_below_600_mb_however_long_the_input(tokenizer_dir, tmp_path):
    ordinary = "".join(json.dumps({"text": text * 20}) + "\n" for text in make_texts(1000))
    longest = json.dumps({"text": "".join(make_texts(20_000))[:3_900_000]}) + "\n"
    peaks = {}
    for name, repeats in (("short", 1), ("long", 4)):
        with open(tmp_path / f"{name}.jsonl", "w") as file:
            file.write('{"text": "' + "x" * 50_000_000 + '"}\n' + longest + ordinary * repeats)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            peaks[name] = process.submit(
                run_task, str(tmp_path / f"{name}.jsonl"), tokenizer_dir, tmp_path / name
            ).result()
        counts = json.loads((tmp_path / name / "job/counts/read-00000.json").read_text())
        assert counts["bad: too long"] == 1 and counts["documents"] == 1 + 1000 * repeats
        (entry,) = (tmp_path / name / "job/quarantine/00000.jsonl").read_text().splitlines()
        assert json.loads(entry)["line"] == 1 and json.loads(entry)["file"] == str(tmp_path / f"{name}.jsonl")
    assert peaks["long"] < 600e6, peaks
    assert peaks["long"] - peaks["short"] < 40e6, peaks
