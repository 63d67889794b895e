"""A job whose process or workers are killed again and again, each time at another file that it writes."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from data_prep import tokenize_corpus
from gmlp_scale.prepare import job as job_module
from tests.data_prep.corpora import contents, make_texts, write_jsonl
from tests.forked import fork, fork_server

NUM_FILES = 6
BY_THE_CLOCK = ("/job/claims/", "/job/progress-")  # written every few seconds, so their number is not the job's own


class Jobs:
    """Starts the job again and again; `num_marks` and `expected` are those of a job that was not killed."""

    def __init__(self, folder: Path, tokenizer_dir: Path):
        for number in range(NUM_FILES):
            write_jsonl(folder / f"corpus/part-{number}.jsonl.gz", make_texts(100, number))
        self._arguments = [
            "--input", f"{folder}/corpus/*.gz", "--tokenizer", str(tokenizer_dir), "--sequence-length", "32",
            "--heldout-fraction", "0.1", "--shard-bytes", "20000", "--workers", "2",
        ]  # fmt: skip
        self._folder = folder
        self._num_started = 0
        assert not self.is_killed(folder / "whole")
        self.num_marks, self.expected = self._marks().stat().st_size, contents(folder / "whole")

    def _marks(self) -> Path:
        return self._folder / f"marks-{self._num_started}"

    def is_killed(self, output: Path, kill_at: int = 0, kills_job: bool = False) -> bool:
        """Run the job; whether the kill met it. A job that was not killed must end well.

        Every file counts twice: just before it appears under its name and just after. At the number `kill_at` the
        process that writes the file is killed, or with `kills_job` the job's own process alone; 0 kills nothing.
        """
        self._num_started += 1
        process = fork(_run_job, [*self._arguments, "--output", str(output)], self._marks(), kill_at, kills_job)
        process.join()
        if not kill_at or self._marks().stat().st_size < kill_at:
            assert process.exitcode == 0
            return False
        if process.exitcode != -9:  # a worker was killed
            errors = Path(f"{self._marks()}.errors").read_text()
            assert process.exitcode == 1 and not kills_job
            assert "a worker was killed" in errors and "Traceback" not in errors
        return True


def _run_job(arguments: list[str], marks: Path, kill_at: int, kills_job: bool) -> None:
    """Run tokenize_corpus.py. Its errors go to the file MARKS.errors."""
    sys.argv = ["tokenize_corpus.py", *arguments]
    sys.stderr = open(f"{marks}.errors", "w")  # noqa: SIM115
    fork_server()
    count_files = partial(_count_files, marks, kill_at, os.getpid() if kills_job else None)
    job_module._start_worker = partial(_start_worker, count_files)
    count_files()
    sys.exit(tokenize_corpus.main())


def _start_worker(count_files: partial) -> None:
    count_files()
    job_module._start_worker()  # the real one: only the job's own process has another


def _count_files(marks: Path, kill_at: int, victim: int | None) -> None:
    """Add a byte to the file `marks` before each file appears and after; kill at the byte `kill_at`."""
    replace = os.replace

    def mark(target: Path) -> None:
        if any(part in str(target) for part in BY_THE_CLOCK):
            return
        file = os.open(marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        number = os.lseek(file, 0, os.SEEK_CUR)  # where this byte ends, whatever other processes append
        os.close(file)
        if number == kill_at:
            os.kill(victim or os.getpid(), signal.SIGKILL)

    def counted(source: Path, target: Path) -> None:
        mark(target)
        replace(source, target)
        mark(target)

    os.replace = counted


@pytest.fixture(scope="module")
def jobs(tokenizer_dir, tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("jobs"), tokenizer_dir)


@pytest.mark.parametrize("kills_job", [False, True], ids=["the process that writes", "the job's own process"])
def test_killed_again_and_again_a_job_gives_the_same_bytes(kills_job, jobs, tmp_path, trials, pytestconfig):
    num_kills = 8 if pytestconfig.getoption("--faults") else 4
    assert len(jobs.expected) > 2 * NUM_FILES and jobs.num_marks > 2 * len(jobs.expected)
    output, receipts_at_kills = tmp_path / "killed", []
    for number in range(num_kills):
        kill_at = 1 + number * (jobs.num_marks - 2) // (num_kills - 1)  # from the first file to before the manifest
        if not jobs.is_killed(output, kill_at, kills_job):  # fewer files were left to write
            assert contents(output) == jobs.expected
            output = tmp_path / f"killed-{number}"
            assert jobs.is_killed(output, kill_at, kills_job)
        receipts_at_kills.append(len(list(output.glob("job/receipts/0*.json"))))
    assert not (output / "manifest.json").exists()
    assert not jobs.is_killed(output)
    assert contents(output) == jobs.expected
    assert len(receipts_at_kills) == num_kills
    assert {0, NUM_FILES} < set(receipts_at_kills), receipts_at_kills
    trials("data job killed, its processes or its own", num_kills)
