"""The runs of the table: their order, what is done, and training the rest.

What a finished run gave is in OUTPUT/results/NAME.json. The page needs nothing else of it.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from gmlp_scale.analysis.heldout import evaluate_models
from gmlp_scale.analysis.pictures import spatial_matrices
from gmlp_scale.analysis.run_records import curve
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.data.shards import Manifest
from gmlp_scale.distributed.world import World
from gmlp_scale.models.gmlp import GmlpConfig
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.recipe.config import ConfigError, RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.recipe.resume import changed_fields
from gmlp_scale.science.claims import MODELS, PARTS, RATES, SCHEDULE, Quantity, Trained, rates_of, toeplitz_share
from gmlp_scale.storage.claim import ClaimedError
from gmlp_scale.storage.files import create_file, read_json, read_json_if_there, write_text
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.metrics import StartUp
from gmlp_scale.train.resolve import resolve, with_decided_precision
from gmlp_scale.train.run import run_task
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.step_guard import NotFiniteError
from gmlp_scale.train.trial import new_engine, random_batch, seconds_of, train_step

log = logging.getLogger(__name__)

HELDOUT_ROWS = 10_000
"""Held-out rows of the evaluation after a run, whose loss counts: the first ones, or all if there are fewer."""


def arguments(model: str, rate: float, seed: int) -> list[str]:
    """The recipe's name and the fields that make one of its runs."""
    recipe, *own = MODELS[model]
    fields = {field.partition("=")[0]: field for field in (*SCHEDULE, *own)}.values()
    name = f"{model}_rate_{rate:g}_seed_{seed}"
    return [recipe, *fields, f"optimizer.peak_learning_rate={rate:g}", f"seed={seed}", f"name={name}"]


@cache
def _load(model: str, rate: float, seed: int, overrides: tuple[str, ...]) -> RunConfig:
    recipe, *fields = arguments(model, rate, seed)
    return load_run_config(recipe, [*fields, *overrides])


@dataclass(frozen=True)
class Table:
    output: str
    """The folder of the runs' folders and of results."""
    parts: tuple[str, ...]
    num_seeds: int
    overrides: tuple[str, ...]
    """Fields of every run, besides output_dir and data.shards."""
    shards: str | None = None
    """Needed to train; None to read what is done."""

    def __post_init__(self):
        """Raises ConfigError where an override would make different models alike."""
        own = {field.partition("=")[0] for model in self.models for field in arguments(model, RATES[0], 0)}
        own -= {field.partition("=")[0] for field in SCHEDULE}
        own |= {name.partition(".")[0] for name in own}  # a whole section
        if taken := [field for field in self.overrides if field.partition("=")[0] in own]:
            mistakes = [f"{field}: the runs of these parts differ in it" for field in taken]
            raise ConfigError("the overrides", mistakes, "give fields that they share")

    @property
    def models(self) -> list[str]:
        """The models of the parts, in the order in which they are trained."""
        return list(dict.fromkeys(model for part in PARTS if part in self.parts for model in PARTS[part][1]))

    def run(self, model: str, rate: float, seed: int) -> RunConfig:
        places = (f"output_dir={self.output}", *([f"data.shards={self.shards}"] if self.shards else []))
        return _load(model, rate, seed, (*self.overrides, *places))

    def num_parameters(self, model: str) -> int:
        return count_parameters(self.run(model, RATES[0], 0))

    def runs(self) -> Iterator[RunConfig]:
        """Part by part and model by model: seed 0 at all rates and then, once the rate is chosen, the other seeds. What
        parts share comes again."""
        for part in (part for part in PARTS if part in self.parts):
            for model in PARTS[part][1]:
                for rate in rates_of(part):
                    yield self.run(model, rate, 0)
                if rate := self.chosen_rate(model, part):
                    for seed in range(1, self.num_seeds):
                        yield self.run(model, rate, seed)

    def result(self, run: RunConfig) -> dict | None:
        """What a finished run gave; None if it is not done. ConfigError if the file is of another run."""
        if (content := read_json_if_there(self.place(run))) is None:
            return None
        if changed := changed_fields(content["config"], run, "train.precision"):
            needed = "needed are the fields of before, or another --output"
            raise ConfigError(f"{self.place(run)} is of another run", changed, needed)
        return content

    def place(self, run: RunConfig) -> str:
        return f"{self.output}/results/{run.name}.json"

    def grid(self, model: str, part: str) -> dict[float, float | None]:
        """The loss of seed 0 at each rate of the part; None where the run is not done."""
        results = {rate: self.result(self.run(model, rate, 0)) for rate in rates_of(part)}
        return {rate: result and result["loss"] for rate, result in results.items()}

    def chosen_rate(self, model: str, part: str) -> float | None:
        """The rate with the lowest loss, once all are done."""
        grid = self.grid(model, part)
        return None if None in grid.values() else min(grid, key=grid.__getitem__)

    def losses(self, model: str, part: str) -> dict[int, float]:
        """The loss of each finished seed at the chosen rate."""
        if not (rate := self.chosen_rate(model, part)):
            return {}
        results = {seed: self.result(self.run(model, rate, seed)) for seed in range(self.num_seeds)}
        return {seed: result["loss"] for seed, result in results.items() if result}

    def left(self, model: str, part: str) -> set[str]:
        """The names of the runs that are not done; other names for other seeds of a rate that is not chosen yet."""
        left = {self.run(model, rate, 0).name for rate, loss in self.grid(model, part).items() if loss is None}
        rate = self.chosen_rate(model, part)
        for seed in set(range(1, self.num_seeds)) - self.losses(model, part).keys():
            left.add(self.run(model, rate, seed).name if rate else f"{model}, seed {seed} in part {part}")
        return left

    def trained(self, model: str, part: str, seed: int) -> Trained:
        result = self.result(self.run(model, self.chosen_rate(model, part), seed))
        return Trained(result["loss"], self.num_parameters(model), result.get("toeplitz_share", math.nan))

    def values(self, quantity: Quantity) -> list[float]:
        """The quantity on each seed for which all its runs are done."""
        part, models = quantity.part, quantity.models
        done = set.intersection(*(set(self.losses(model, part)) for model in models))
        return [quantity.value(*(self.trained(model, part, seed) for model in models)) for seed in sorted(done)]

    def precision(self) -> str | None:
        """The precision of all finished runs. ConfigError if they differ in precision or text: no comparison then."""
        found = {}
        for run in self.runs():
            if result := self.result(run):
                found[result["config"]["train"]["precision"], result["shards_sha256"]] = run.name
        if len(found) > 1:
            needed = "needed are runs on one text in one precision: delete those that differ, or give another --output"
            mistakes = [f"{name}: {precision}, shards {sha256}" for (precision, sha256), name in found.items()]
            raise ConfigError(self.output, mistakes, needed)
        return next(iter(found))[0] if found else None


def like_the_first_start(table: Table, world: World, *, keep: bool) -> Table:
    """The table in the precision that the first start decided. That start writes it to first_start.json if `keep`.

    Raises:
        ConfigError: the table asks for another precision or text than the first start, so runs could not be compared.
    """
    path, first = f"{table.output}/first_start.json", next(table.runs())
    asked = {"precision": first.train.precision, "shards_sha256": Manifest.load(table.shards).sha256}
    try:
        known = read_json(path)
    except FileNotFoundError:
        known = asked | {"precision": with_decided_precision(first, world).train.precision}
        if keep:
            with suppress(FileExistsError):  # another process has decided meanwhile
                create_file(path, json.dumps(known).encode())
            known = read_json(path)
    mistakes = [
        f"{name}: found {found}; the runs there have {known[name]}"
        for name, found in asked.items()
        if found not in ("auto", known[name])
    ]
    if mistakes:
        raise ConfigError(table.output, mistakes, "give the text and precision of the first start, or another --output")
    return replace(table, overrides=(*table.overrides, f"train.precision={known['precision']}"))


def train_all(table: Table, world: World) -> None:
    """Trains what is not done, and goes on with what was stopped. Returns at the end or after a stop signal.

    A run that another process trains is left to it, so several can share the work.
    """
    elsewhere: set[str] = set()
    while run := next((r for r in table.runs() if r.name not in elsewhere and not table.result(r)), None):
        content = {"config": run.to_json(), "shards_sha256": Manifest.load(run.data.shards).sha256}
        try:
            progress = run_task(Pretraining(resolve(run, world)), world, StartUp(time.perf_counter()))
            if not progress.finished:
                return
            content |= _measured(run, world)
        except ClaimedError as error:
            log.info("left to the process that trains it: %s", error)
            elsewhere.add(run.name)
            continue
        except NotFiniteError as error:
            log.warning("%s counts as infinitely bad: %s", run.name, error)
            content["loss"] = float("inf")
        write_text(table.place(run), json.dumps(content, indent=2) + "\n")
        elsewhere.clear()  # their process may have been stopped
    log.info("nothing is left to start; training elsewhere: %s", ", ".join(sorted(elsewhere)) or "nothing")


def _measured(run: RunConfig, world: World) -> dict[str, Any]:
    """The held-out loss, those of the evaluations on the way as [step, loss], and of a dense W toeplitz_share: the mean
    of the blocks' shares."""
    trained = read_run(run.run_folder)
    measured = {"loss": evaluate_models([trained], run.data.shards, HELDOUT_ROWS, world)["models"][0]["loss"]}
    measured["evaluations"] = curve(read_metrics(f"{run.run_folder}/metrics.jsonl"), "eval/loss")
    if isinstance(run.model, GmlpConfig) and run.model.spatial == "dense":
        shares = [toeplitz_share(matrix_NN) for matrix_NN in spatial_matrices(trained)]
        measured["toeplitz_share"] = float(np.mean(shares))
    return measured


def budget(table: Table, world: World) -> str:
    """A line for each part. A run that several parts share counts in the first of them."""
    lines = [f"{'part':6}{'models':>6}{'runs left':>11}{'PFLOP':>9}{'hours':>9}{'in all':>9}"]
    counted, hours_in_all = set(), 0.0
    for part in (part for part in PARTS if part in table.parts):
        models = PARTS[part][1]
        left = {model: table.left(model, part) - counted for model in models}
        counted.update(*left.values())
        runs = {model: table.run(model, RATES[0], 0) for model in models if left[model]}
        flops = {model: len(left[model]) * _flops(run) for model, run in runs.items()}
        hours = sum(flops[model] / _flop_rate(run, world) / 3600 for model, run in runs.items())
        hours_in_all += hours
        num_left, pflop = sum(map(len, left.values())), sum(flops.values()) / 1e15
        lines.append(f"{part:6}{len(models):6}{num_left:11}{pflop:9.3f}{hours:9.2f}{hours_in_all:9.2f}")
    precision = table.run(table.models[0], RATES[0], 0).train.precision
    lines.append(
        f"hours of one process like this, in {precision}, with {torch.get_num_threads()} CPU threads on free cores"
    )
    return "\n".join(lines)


def _flops(run: RunConfig) -> float:
    """FLOPs of a whole run with its evaluations, which have no backward pass."""
    train, num_heldout = run.train, Manifest.load(run.data.shards).num_rows("heldout")
    num_evaluated = train.num_steps // train.evaluate_every_steps * min(train.num_evaluation_rows, num_heldout)
    num_evaluated += min(HELDOUT_ROWS, num_heldout)
    return run.flops_per_step().before(train.num_steps) + run.flops_per_row().last * num_evaluated / 3


def _flop_rate(run: RunConfig, world: World) -> float:
    """FLOPs per second of the best of three training steps. On a CPU it is the rate on free cores: CPU time counts."""
    step = partial(train_step, new_engine(run, world), run, random_batch(run, world.device))
    step()  # the first one takes longer
    seconds = min(_seconds(step, world.device) for _ in range(3))
    return run.flops_per_row().last * run.train.micro_batch_size / seconds


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        return seconds_of(call, device)
    started = time.process_time()
    call()
    return (time.process_time() - started) / torch.get_num_threads()
