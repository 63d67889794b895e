"""Short runs of a recipe on random rows, and comparisons of what they leave behind."""

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.loading import random_rows, write_shards
from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.data.loader import Loader
from gmlp_scale.distributed.logs import set_up_logging
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.loop import Progress
from gmlp_scale.train.metrics import StartUp
from gmlp_scale.train.run import run_task
from gmlp_scale.train.sinks import read_metrics

NUM_STEPS, STOP_STEP = 6, 3
NUM_TRAINING_ROWS, NUM_HELDOUT_ROWS = 2048, 8

SCHEDULE = [
    "train.num_steps=1000", f"train.stop_after_step={NUM_STEPS}", "train.log_every_steps=1",
    "train.evaluate_every_steps=1000", f"train.num_evaluation_rows={NUM_HELDOUT_ROWS}",
    "optimizer.peak_learning_rate=1.0e-3", "optimizer.warmup_steps=2", "optimizer.gradient_clipping=0.5",
    "checkpoint.save_every_steps=1000",
]  # fmt: skip


class Verdict(NamedTuple):
    problem: str | None
    figures: dict


@dataclass(frozen=True)
class Trial:
    """Runs of one recipe on random rows, each in a folder of its own."""

    recipe: str
    overrides: list[str]
    folder: Path

    @classmethod
    def prepare(cls, recipe: str, overrides: list[str], folder: Path) -> "Trial":
        """Writes the rows. ConfigError if the recipe has mistakes."""
        trial = cls(recipe, [*SCHEDULE, *overrides, f"data.shards={folder / 'shards'}", f"output_dir={folder}"], folder)
        config = trial.config("shards")
        write_shards(config, random_rows(config, NUM_TRAINING_ROWS), folder / "shards", NUM_HELDOUT_ROWS)
        return trial

    def config(self, name: str, *overrides: str) -> RunConfig:
        return load_run_config(self.recipe, [*self.overrides, f"name={re.sub('[ ,]+', '-', name)}", *overrides])

    def world(self, *overrides: str, hear_stop_signals: bool = False) -> World:
        """With a process group, which every engine can use.

        hear_stop_signals: for a run that is stopped by a signal. Others end at once when their part's time is over.
        """
        config = self.config("world", *overrides)
        world = start_world(
            config.engine.timeout_seconds, config.train.device, init_group=True, hear_stop_signals=hear_stop_signals
        )
        set_up_logging(world)
        return world

    def train(self, world: World, name: str, *overrides: str, task: type[Pretraining] = Pretraining) -> Progress:
        """Starts the run of this name, or goes on with it."""
        return run_task(task(self.config(name, *overrides)), world, StartUp(time.perf_counter()))

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.config(name).run_dir / "metrics.jsonl")

    def checkpoint(self, name: str) -> Checkpoint:
        """The run's newest checkpoint, verified."""
        return newest_checkpoint(self.config(name).run_dir / "checkpoints")[0]


class Signalled(Pretraining):
    """Sends its own process SIGTERM as step STOP_STEP begins."""

    def open_loader(self, world: World) -> Loader:
        loader = super().open_loader(world)
        steps = loader.steps

        def signalling(start_step: int, stop_step: int) -> Iterator[list]:
            for step, micro_batches in enumerate(steps(start_step, stop_step), start_step + 1):
                if step == STOP_STEP:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield micro_batches

        loader.steps = signalling
        return loader


def nearness(trial: Trial, name: str, expected_name: str, bounds: Mapping[str, float]) -> Verdict:
    """Compares what two runs logged, step by step. bounds: the largest relative difference, by tag."""
    rows, expected_rows = trial.metrics(name), trial.metrics(expected_name)
    problems, figures = [], {}
    for tag, largest in bounds.items():
        pairs = [(row[tag], other[tag]) for row, other in zip(rows, expected_rows, strict=True) if tag in other]
        found = figures[f"{tag} differs by"] = max(abs(value / other - 1) for value, other in pairs)
        if found > largest:
            problems.append(f"{tag} differs from {expected_name} by {found:.2g}; at most {largest:.2g} is allowed")
    return Verdict("; ".join(problems) or None, figures)


def bit_equality(whole: Checkpoint, resumed: Checkpoint) -> Verdict:
    """Compares all masters and moments of two checkpoints of one step."""
    differences = {}
    for key in whole.keys:
        one, other = whole.read(key), resumed.read(key)
        if not torch.equal(one, other):
            differences[key] = ((one - other).abs().max() / one.abs().max()).item()
    if whole.step == resumed.step and not differences:
        return Verdict(None, {"bit_identical_tensors": len(whole.keys)})
    worst = max(differences, key=differences.__getitem__, default=None)
    problem = f"steps {whole.step} and {resumed.step}: {len(differences)} of {len(whole.keys)} tensors differ"
    return Verdict(problem, {"worst": worst, "relative_difference": differences.get(worst)})
