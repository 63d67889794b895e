"""Starts processes that need not import anything: they are forked from one that has imported all that is slow."""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.slow_imports"])


def fork(
    function: Callable, *arguments: Any, outputs: tuple[int, int] = (1, 2), environment: dict[str, str] | None = None
) -> BaseProcess:
    """Starts function(*arguments), both picklable, with this process's variables and those in `environment`.

    What it prints goes to the two file numbers `outputs`.
    """
    # The server has the environment and the outputs of its own start; a Connection is what can hand a file over.
    files = [Connection(os.dup(number), readable=False) for number in outputs]
    process = CONTEXT.Process(target=_run, args=(function, arguments, os.environ | (environment or {}), files))
    process.start()
    for file in files:
        file.close()
    return process


def _run(function: Callable, arguments: tuple, environment: dict[str, str], files: list[Connection]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
        file.close()
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def fork_server() -> None:
    """Starts this process's own forkserver, as a fork of this process: its workers need not import anything either.

    To be called before there are threads.
    """
    start, util.spawnv_passfds = util.spawnv_passfds, _fork_and_run
    forkserver.ensure_running()
    util.spawnv_passfds = start


def _fork_and_run(_program: str, words: list[str], files: list[int]) -> int:
    """Does what a new Python does that has these words on its command line, of which the last is a program."""
    child = os.fork()
    if child:
        return child
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number not in files:
                with suppress(OSError):  # the listing's own
                    os.close(number)
        exec(words[-1])
    finally:
        os._exit(0)


class Script:
    """A script of this repository, started as `python FILE ARGUMENTS` would start it in the repository's root."""

    def __init__(self, file: str, arguments: list[object], *, environment=None, prepare: Callable | None = None):
        """`prepare()`, if given, is called first, in the new process."""
        self._printed, self._errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        outputs = (self._printed.fileno(), self._errors.fileno())
        words = [file, *map(str, arguments)]
        self._process = fork(_call_main, words, prepare, outputs=outputs, environment=environment)

    def end(self, timeout_seconds: float = 300) -> tuple[int, str, str]:
        """Waits for it; returns its exit code, what it printed and its errors."""
        self._process.join(timeout_seconds)
        if (code := self._process.exitcode) is None:
            self._process.kill()
        assert code is not None, f"it did not end in {timeout_seconds} s: {_content(self._errors)}"
        return code, _content(self._printed), _content(self._errors)


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def _call_main(words: list[str], prepare: Callable | None) -> None:
    if prepare:
        prepare()
    os.chdir(ROOT)
    sys.argv = words
    sys.path.insert(0, str((ROOT / words[0]).parent))
    sys.exit(importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main())
