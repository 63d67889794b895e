"""The memory of a task does not grow with its input."""

import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_documents import ReadDocuments
from gmlp_scale.prepare.write_shards import WriteShards
from tests.data_prep.corpora import make_texts


def run_task(corpus: str, tokenizer_dir: Path, output: Path) -> int:
    """Peak memory in bytes of a process that runs one task."""
    options = JobOptions(
        input=[corpus], tokenizer=str(tokenizer_dir), output=str(output), sequence_length=512, shard_bytes=1 << 20,
        max_bad_fraction=1.0,
    )  # fmt: skip
    WriteShards(options).run(ReadDocuments(options, "tokenizing").run())
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
