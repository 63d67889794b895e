"""A contender in its own process, as its users start it, so that it has its own memory, threads and settings."""

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

Turn = Callable[[], float]
"""Runs once, timed, and returns the seconds."""


class Contender:
    """Calls `prepare(*arguments)` -> (turn, description) in a new process, which ends with this one.

    Raises:
        ImportError: `prepare` needs a package that is not installed.
        ChildProcessError: the process died; its own error is on stderr.
    """

    def __init__(self, name: str, prepare: Callable[..., tuple[Turn, dict]], *arguments: object):
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True).start()
        theirs.close()
        missing, self.description = self._received()
        if missing:
            raise ImportError(missing)

    def take_turn(self) -> float:
        with contextlib.suppress(ConnectionError):  # if the process is dead, receiving says so
            self._pipe.send("go")
        return self._received()

    def _received(self) -> object:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise ChildProcessError(
                f"the benchmark's process of {self._name} died, of the error above: mend or uninstall what it names, "
                "or leave its part out of --parts"
            ) from None


def _serve(pipe: Connection, prepare: Callable[..., tuple[Turn, dict]], arguments: tuple) -> None:
    try:
        turn, description = prepare(*arguments)
    except ImportError as error:
        pipe.send((f"not installed: {error}", {}))
        return
    pipe.send((None, description))
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(turn())
