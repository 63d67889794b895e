"""A job whose process or workers are killed again and again, each time at another file that it writes."""

from pathlib import Path

import pytest

from tests.data_prep.corpora import contents, make_texts, write_jsonl
from tests.data_prep.killing import start_job

NUM_FILES = 8
NUM_KILLS = 20


class Jobs:
    """Starts the job again and again and counts what becomes of it."""

    def __init__(self, folder: Path, tokenizer_dir: Path):
        for number in range(NUM_FILES):
            write_jsonl(folder / f"corpus/part-{number}.jsonl.gz", make_texts(150, number))
        self._arguments = f"--input {folder}/corpus/*.gz --tokenizer {tokenizer_dir} --sequence-length 32".split()
        self._arguments += ["--heldout-fraction", "0.1", "--shard-bytes", "20000", "--workers", "2"]
        self._folder = folder
        self._num_started = 0

    def marks(self) -> Path:
        return self._folder / f"marks-{self._num_started}"

    def is_killed(self, output: Path, kill_at: int = 0, kills_job: bool = False) -> bool:
        """Run the job; whether the kill met it. A job that was not killed must end well."""
        self._num_started += 1
        arguments = [*self._arguments, "--output", str(output)]
        process = start_job(arguments, self.marks(), kill_at=kill_at, kills_job=kills_job)
        process.join()
        if not kill_at or self.marks().stat().st_size < kill_at:
            assert process.exitcode == 0
            return False
        errors = Path(f"{self.marks()}.errors").read_text()
        if process.exitcode != -9:  # a worker was killed
            assert process.exitcode == 1 and not kills_job
            assert "a worker was killed" in errors and "Traceback" not in errors
        return True


@pytest.mark.parametrize("kills_job", [False, True], ids=["the process that writes", "the job's own process"])
def test_killed_again_and_again_a_job_gives_the_same_bytes(kills_job, tokenizer_dir, tmp_path):
    jobs = Jobs(tmp_path, tokenizer_dir)
    assert not jobs.is_killed(tmp_path / "whole")
    num_marks, expected = jobs.marks().stat().st_size, contents(tmp_path / "whole")
    assert num_marks > 2 * len(expected) > 4 * NUM_FILES
    output, receipts_at_kills = tmp_path / "killed", []
    for number in range(NUM_KILLS):
        kill_at = 1 + number * (num_marks - 1) // (NUM_KILLS - 1)  # from the first file to the last
        if not jobs.is_killed(output, kill_at, kills_job):  # fewer files were left to write
            assert contents(output) == expected
            output = tmp_path / f"killed-{number}"
            assert jobs.is_killed(output, kill_at, kills_job)
        receipts_at_kills.append(len(list(output.glob("job/receipts/0*.json"))))
    assert not jobs.is_killed(output)
    assert contents(output) == expected
    assert len(receipts_at_kills) == NUM_KILLS
    assert {0, NUM_FILES} < set(receipts_at_kills), receipts_at_kills
