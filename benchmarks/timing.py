"""Times calls that take turns, in this process or in contenders' own; the recipes that can be timed, and commands that
measure one."""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from multiprocessing.connection import Connection

import torch

from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.recipe.config import ConfigError, RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.trial import seconds_of

NUM_WARM_UP_ROUNDS = 2  # compilation, allocation, clocks
CALLS_PER_TURN_ON_CUDA = 5  # in a row, without waiting for the device between them, as in training

Turn = Callable[[], float]
"""Runs once and returns the seconds that it took."""


def load_measurable(path: str, overrides: Iterable[str]) -> RunConfig:
    """The recipe. ConfigError if it has mistakes, or does not say how many rows are to be timed."""
    run = load_run_config(path, overrides)
    if run.train.micro_batch_size == "auto":
        raise ConfigError(path, ["train.micro_batch_size: found auto; needed: a number, the rows timed here"])
    return run


def recipe_of_command(description: str) -> RunConfig:
    """What the command's --config names, with the fields that the command changes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: smoke")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    return load_measurable(options.config, options.overrides)


def print_from_ranks(description: str, measure: Callable[[RunConfig, World], str]) -> int:
    """Prints on rank 0 what `measure` finds on all ranks together of the command's recipe. Returns 0."""
    run = recipe_of_command(description)
    with start_world(run.engine.timeout_seconds, run.train.device, init_group=True) as world:
        lines = measure(with_decided_precision(run, world), world)
        if world.is_main:
            print(lines)
    return 0


def turns_of(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, Turn]:
    """For each call, by its name, a turn that times it in this process."""
    num_calls = CALLS_PER_TURN_ON_CUDA if device.type == "cuda" else 1
    return {name: partial(seconds_of, call, device, num_calls) for name, call in calls.items()}


def time_in_turns(turns: Mapping[str, Turn], num_rounds: int) -> dict[str, float]:
    """Each contender's median seconds over the rounds, by name."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(-NUM_WARM_UP_ROUNDS, num_rounds):
        for name, take_turn in turns.items():
            elapsed = take_turn()
            if round_ >= 0:
                seconds[name].append(elapsed)
        say(f"round {round_ + NUM_WARM_UP_ROUNDS + 1} of {num_rounds + NUM_WARM_UP_ROUNDS}")
    return {name: statistics.median(values) for name, values in seconds.items()}


def say(what: str) -> None:
    """Progress, on stderr: stdout is for the JSON."""
    print(what, file=sys.stderr, flush=True)


class Contender:
    """Someone's code in its own process, as its users start it: with its own memory, threads and settings.

    Calls `prepare(*arguments)` -> (turn, description) in a new process. It ends with this one, however this one ends.

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
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        turn, description = prepare(*arguments)
    except ImportError as error:
        pipe.send((f"not installed: {error}", {}))
        return
    pipe.send((None, description))
    with contextlib.suppress(EOFError):
        while pipe.recv():
            pipe.send(turn())


def _end_with_parent() -> None:
    """Also if a signal ended the parent, and in the midst of a turn."""
    multiprocessing.parent_process().join()
    os._exit(1)
