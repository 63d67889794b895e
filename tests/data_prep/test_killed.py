"""A job whose process or workers are killed again and again, at random moments."""

import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from data_prep import tokenize_corpus
from tests.data_prep.corpora import contents, make_texts, workers_of, write_jsonl

NUM_KILLS = 20


@pytest.fixture
def start_job(tokenizer_dir, tmp_path, monkeypatch):
    """start_job(output) -> process, forked from one that has imported everything, to be quick."""
    for number in range(8):
        write_jsonl(tmp_path / f"corpus/part-{number}.jsonl.gz", make_texts(150, number))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "data_prep.tokenize_corpus"])

    def start_job(output: Path) -> BaseProcess:
        command = [
            "tokenize_corpus.py", "--input", f"{tmp_path}/corpus/*.gz", "--tokenizer", tokenizer_dir, "--output",
            output, "--sequence-length", 32, "--heldout-fraction", 0.1, "--shard-bytes", 20_000, "--workers", 2,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", [str(word) for word in command])  # which the process is given
        process = context.Process(target=tokenize_corpus.main)
        process.start()
        return process

    return start_job


def is_done(output: Path) -> bool:
    return (output / "manifest.json").exists()


def opened_logs(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.log")}


def finish(process: BaseProcess, output: Path) -> dict[str, bytes]:
    process.join(60)
    assert is_done(output)
    return contents(output)


def test_killed_at_any_moment_and_run_again_gives_the_same_bytes(start_job, tmp_path):
    finish(start_job(tmp_path / "warm"), tmp_path / "warm")
    started = time.monotonic()
    expected = finish(start_job(tmp_path / "whole"), tmp_path / "whole")
    duration = time.monotonic() - started
    assert len(expected) > 8 * 2
    draw = random.Random(0)
    num_kills, output, receipts_at_kills = 0, tmp_path / "killed", []
    while num_kills < NUM_KILLS:
        process = start_job(output)
        if draw.random() < 0.7:  # at a moment of the work, else perhaps before it
            logs = output / "job/executor-tokenizing/logs"
            before = opened_logs(logs)
            while process.is_alive() and opened_logs(logs) == before:
                time.sleep(0.02)
        process.join(draw.uniform(0, 0.4) * duration)
        if is_running := process.is_alive():
            # the job's own process alone, whose workers must end by themselves, or the workers alone
            victims = workers_of(output, process.pid) if draw.random() < 0.5 else []
            for pid in victims or [process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.join()
        if is_running:
            num_kills += 1
            receipts_at_kills.append(len(list(output.glob("job/receipts/0*.json"))))
        if is_done(output):
            assert contents(output) == expected
            output = tmp_path / f"killed-{num_kills}"
    assert finish(start_job(output), output) == expected
    assert max(receipts_at_kills) >= 2, receipts_at_kills
