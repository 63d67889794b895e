"""A tokenizing job that is killed when it has come so far, counted in the files that it puts into place."""

import os
import signal
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from data_prep import tokenize_corpus
from gmlp_scale.prepare import worker_pool
from tests.forked import fork, fork_server

_BY_THE_CLOCK = ("/job/claims/", "/job/progress-")  # written every few seconds, so their number is not the job's own


def start_job(arguments: list[str], marks: Path, *, kill_at: int, kills_job: bool) -> BaseProcess:
    """Start tokenize_corpus.py.

    Every file counts twice: just before it appears under its name and just after. The file `marks` gets a byte each
    time. At the number `kill_at` the process that writes the file is killed, or with `kills_job` the job's own process
    alone; 0 kills nothing. What the job prints as errors goes to the file MARKS.errors.
    """
    return fork(_run_job, arguments, marks, kill_at, kills_job)


def _run_job(arguments: list[str], marks: Path, kill_at: int, kills_job: bool) -> None:
    sys.argv = ["tokenize_corpus.py", *arguments]
    sys.stderr = open(f"{marks}.errors", "w")  # noqa: SIM115
    victim = os.getpid() if kills_job else None
    fork_server()
    worker_pool._start_worker = partial(_start_worker, marks, kill_at, victim)
    _count_files(marks, kill_at, victim)
    sys.exit(tokenize_corpus.main())


def _start_worker(marks: Path, kill_at: int, victim: int | None) -> None:
    _count_files(marks, kill_at, victim)
    worker_pool._start_worker()  # the real one: only the job's own process has another


def _count_files(marks: Path, kill_at: int, victim: int | None) -> None:
    replace = os.replace

    def counted(source: Path, target: Path) -> None:
        is_counted = not any(part in str(target) for part in _BY_THE_CLOCK)
        if is_counted:
            _mark(marks, kill_at, victim)
        replace(source, target)
        if is_counted:
            _mark(marks, kill_at, victim)

    os.replace = counted


def _mark(marks: Path, kill_at: int, victim: int | None) -> None:
    file = os.open(marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR)  # where this byte ends, whatever other processes append
    os.close(file)
    if number == kill_at:
        os.kill(victim or os.getpid(), signal.SIGKILL)
