"""Many finetuning runs of one recipe: its grid of batches and rates, then its seeds, and one table at the end.

Every run has its own folder inside the recipe's folder. So the same command given again skips the runs that are done
and resumes the others. It writes table.md and table.json once all are done. There the paper's scores (arXiv 2105.08050,
Tables 4 and 6) stand beside those of a run of the same model and data.
"""

import itertools
import logging
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import torch

from gmlp_scale.distributed.world import World
from gmlp_scale.errors import InputError
from gmlp_scale.export.card import render
from gmlp_scale.export.folder import json_text
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import Finetuning, Inputs, by_name, finetune, with_precision
from gmlp_scale.models import with_kernels
from gmlp_scale.plan.describe import describe_resume, describe_states, short
from gmlp_scale.plan.rank_bytes import state_bytes
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.recipe.resume import changed_fields, check_unchanged
from gmlp_scale.storage.files import read_json_if_there, redacted, write_text
from gmlp_scale.tasks.table import TASKS
from gmlp_scale.train.step_guard import NotFiniteError

log = logging.getLogger(__name__)

_COMPARED = ("scores", "config", "data")
"""The parts of scores.json that are compared with the run's."""
_COLUMNS = (
    ("sst2", "accuracy"),
    ("mnli", "accuracy"),
    ("mnli", "accuracy_mismatched"),
    ("squad_v1", "f1"),
    ("squad_v2", "f1"),
)
"""The task and the score of each of the numbers below. Of the short models only the first two are known.
They are in percent: accuracy for SST-2 and for both development sets of MNLI, F1 for SQuAD."""
_PAPER: dict[str, tuple[str, tuple[float, ...]]] = {
    "bert_base": ("BERT base", (93.8, 85.6, 85.7, 90.2, 78.6)),
    "gmlp_base": ("gMLP base", (94.2, 83.7, 84.1, 86.7, 70.1)),
    "amlp_base": ("aMLP base", (93.4, 85.9, 85.8, 90.7, 80.9)),
    "bert_large": ("BERT large", (94.3, 87.0, 87.4, 92.0, 81.0)),
    "gmlp_large": ("gMLP large", (94.8, 86.2, 86.5, 89.5, 78.3)),
    "amlp_large": ("aMLP large", (94.8, 88.4, 88.4, 92.2, 85.4)),
    "gmlp_xlarge": ("gMLP xlarge", (95.6, 87.7, 87.7, 90.9, 82.1)),
    "table4_bert_6": ("Transformer, 6+6 layers", (90.4, 81.5)),
    "table4_bert_12": ("Transformer, 12+12 layers", (91.3, 83.3)),
    "table4_bert_24": ("Transformer, 24+24 layers", (92.1, 85.2)),
    "table4_bert_48": ("Transformer, 48+48 layers", (92.8, 86.3)),
    "table4_gmlp_18": ("gMLP, 18 layers", (91.2, 77.7)),
    "table4_gmlp_36": ("gMLP, 36 layers", (92.3, 80.9)),
    "table4_gmlp_72": ("gMLP, 72 layers", (93.5, 82.8)),
    "table4_gmlp_144": ("gMLP, 144 layers", (95.1, 84.6)),
}
"""The paper's name and scores of the model that each recipe pretrains."""


def members(run: FinetuneConfig, *, grid: bool) -> list[FinetuneConfig]:
    """The runs of the grid with the recipe's seed, or without `grid` one run at the recipe's own point."""
    batch_sizes, rates = [run.train.global_batch_size], [run.optimizer.peak_learning_rate]
    if grid:
        batch_sizes, rates = run.grid.global_batch_size, run.grid.peak_learning_rate
    points = itertools.product(batch_sizes, rates)
    return [member(run, {"global_batch_size": size, "peak_learning_rate": rate}, run.seed) for size, rate in points]


def member(run: FinetuneConfig, point: Mapping[str, Any], seed: int) -> FinetuneConfig:
    """The recipe's run at a point of the grid and with a seed, in its own folder. A sweep's table holds its point."""
    batch_size, rate = point["global_batch_size"], point["peak_learning_rate"]
    return run.model_copy(
        update={
            "output_dir": run.run_folder,
            "name": f"batch_{batch_size}_rate_{rate:g}_seed_{seed}",
            "seed": seed,
            "train": run.train.model_copy(update={"global_batch_size": batch_size}),
            "optimizer": run.optimizer.model_copy(update={"peak_learning_rate": rate}),
        }
    )


def sweep(run: FinetuneConfig, inputs: Inputs, world: World, *, num_seeds: int, grid: bool) -> dict | None:
    """Runs the grid with the recipe's seed, picks the point with the best dev score, and runs the other seeds there.

    A run counts by the dev score of its last weights, not of its best evaluation. A point whose loss or gradient norm
    is not finite counts as the worst, if there are others. Returns the content of table.json, or None if a run was
    stopped.

    Raises:
        One of errors.USER_ERRORS, such as ConfigError if a finished run had another recipe or other data, and
        NotFiniteError if every point diverges, or another seed at the best one.
    """
    first = with_precision(members(run, grid=grid)[0], inputs, world)
    run = run.with_train(precision=first.train.precision)
    tried, points = [], members(run, grid=grid)
    for point in points:
        scores = _scores(point, inputs, world, may_diverge=len(points) > 1)
        if scores is None:
            return None
        tried.append(scores)
    finite = [scores for scores in tried if scores["scores"]]
    if not finite:
        raise NotFiniteError(f"{run.run_folder}: all points of the grid diverged; give a lower grid.peak_learning_rate")
    picked = finite[best_of([by_name(scores["scores"])[run.task_row.main_score] for scores in finite])]
    seeds = [picked]
    for seed in range(run.seed + 1, run.seed + num_seeds):
        scores = _scores(member(run, _point(picked), seed), inputs, world, may_diverge=False)
        if scores is None:
            return None
        seeds.append(scores)
    table = build_table(run, inputs, tried, seeds)
    world.on_main(lambda: write_table(run.run_folder, table, to_markdown(table)))
    return table


def best_of(scores: list[float]) -> int:
    """The index of the highest score, the first of equals. NaN is the lowest."""
    return int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))


def _point(scores: dict) -> dict[str, float]:
    """The point of the grid that a run's scores.json is of."""
    return {
        "global_batch_size": scores["config"]["train"]["global_batch_size"],
        "peak_learning_rate": scores["config"]["optimizer"]["peak_learning_rate"],
    }


def build_table(run: FinetuneConfig, inputs: Inputs, tried: list[dict], seeds: list[dict]) -> dict:
    """The content of table.json. The scores are those of metrics.jsonl: accuracy from 0 to 1, SQuAD's in percent."""
    of_seeds = [by_name(scores["scores"]) for scores in seeds]
    columns = {name: [scores[name] for scores in of_seeds] for name in of_seeds[0]}
    paper = published(run, inputs)
    return {
        "task": run.task,
        "model": redacted(run.model),
        "pretrained": run.pretrained,
        **_point(seeds[0]),
        "num_examples": seeds[0]["num_examples"],
        "seeds": [scores["seed"] for scores in seeds],
        "scores": {
            name: {"median": median(values), "minimum": min(values), "maximum": max(values), "by_seed": values}
            for name, values in columns.items()
        },
        "grid": [{**_point(scores), "scores": by_name(scores["scores"])} for scores in tried],
        "paper": {"model": paper[0], "scores_in_percent": paper[1]} if paper else None,
    }


def published(run: FinetuneConfig, inputs: Inputs) -> tuple[str, dict[str, float]] | None:
    """The paper's name of the model and its scores on the task. None unless model and data are those of the paper."""
    config, sizes = with_kernels(inputs.pretrained.config, "auto"), run.task_row.official_sizes
    is_official = all(rows.num_examples == sizes.get(part, rows.num_examples) for part, rows in inputs.rows.items())
    for recipe, (name, numbers) in _PAPER.items() if is_official and run.pretrained else ():
        # A model with another vocabulary, or that reads padding, is still compared with the paper's scores.
        free = {"vocab_size": config.vocab_size, "masks_padding": config.masks_padding}
        if load_run_config(recipe).model.model_copy(update=free) == config:
            columns = zip(_COLUMNS, numbers, strict=False)
            scores = {score: number for (task, score), number in columns if task == run.task}
            return (name, scores) if scores else None
    return None


def to_markdown(table: dict) -> str:
    """The table for a reader, with accuracy in percent, as in the paper."""
    task = TASKS[table["task"]]
    words = {"shown": task.shown, "main_score": task.main_score}
    return render("sweep.md", package="gmlp_scale.finetune", table=table, **words)


def describe(runs: list[FinetuneConfig], num_seeds: int, inputs: Inputs, world_size: int) -> str:
    """The text of --dry-run: the first run's resolved config and what follows from it, then the other runs' folders.

    Raises:
        ConfigError: a run does not fit the data.
    """
    tasks = [Finetuning(run, inputs) for run in runs]
    run, task = runs[0], tasks[0]
    with torch.device("meta"):
        model = task.build_model()
    num_micro_batches, num_steps = task.train.num_micro_batches(world_size).last, task.train.num_steps
    micro_batches = f"{num_micro_batches} micro-batches of {run.train.micro_batch_size} rows each"
    is_auto = run.train.precision == "auto"
    precision = "float32" if is_auto else run.train.precision
    states = state_bytes(run.engine, model, task.optimizer, precision, world_size, accumulates=num_micro_batches > 1)
    flops, tokens = task.flops_per_step.last, task.tokens_per_step.last
    lines = [
        run.to_yaml(),
        f"model                   {inputs.pretrained.config}",
        f"ranks                   {world_size}, {micro_batches}",
        f"parameters              {sum(parameter.numel() for parameter in model.parameters()):,}",
        f"FLOPs per step          {short(flops)} ({short(flops / tokens)} per token)",
        f"tokens per step         {tokens:,}",
        *(["precision               decided when the run starts; below are float32's figures"] if is_auto else []),
        describe_states(states),
        *(
            f"{part:24}{rows.num_examples:,} examples, {rows.num_rows:,} rows of {run.data.sequence_length} tokens"
            for part, rows in inputs.rows.items()
        ),
        f"steps                   {num_steps:,}, {task.optimizer.warmup_steps:,} of them warm-up; "
        f"{num_steps * run.train.global_batch_size / task.num_rows:.2f} epochs",
        describe_resume(run.run_folder),
    ]
    if len(runs) > 1 or num_seeds > 1:
        num_runs = len(runs) + num_seeds - 1
        lines.append(f"runs                    {num_runs}: the grid's, then the other seeds' at the best")
        lines += [f"    {task.config.run_folder}: {task.train.num_steps:,} steps" for task in tasks]
    return "\n".join(lines)


def _scores(run: FinetuneConfig, inputs: Inputs, world: World, *, may_diverge: bool) -> dict | None:
    """The content of scores.json of a run, which is trained unless it is done; None if it was stopped.

    A run that `may_diverge` is done then too: its scores.json has no scores. Otherwise NotFiniteError names it.
    """
    content = _finished(run, inputs, world)
    if content and (content["scores"] or may_diverge):
        return content
    try:
        return finetune(run, inputs, world)
    except NotFiniteError as error:
        if not may_diverge:
            raise NotFiniteError(f"{run.name}: {error}") from None
        if world.is_main:
            log.warning("%s counts as the worst point: %s", run.name, error)
        content = {"scores": {}, "diverged": str(error), "config": run.to_json()}
        content |= {"data": inputs.fingerprint, "tests": inputs.tests_fingerprint}
        world.on_main(lambda: write_text(f"{run.run_folder}/scores.json", json_text(content)))
        return content


def _finished(run: FinetuneConfig, inputs: Inputs, world: World) -> dict | None:
    """The content of scores.json of a run that is done. ConfigError if it had another recipe, model or data.

    A run that has predicted other test parts, or none, is not done: its last checkpoint predicts those of now.
    """
    path = f"{run.run_folder}/scores.json"
    content = world.on_main(lambda: read_json_if_there(path))
    if content is None:
        return None
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in _COMPARED):
        raise InputError(f"{path} is damaged: remove it, and the run writes it again")
    changed = [
        *changed_fields(content["config"], run),
        *(f"data {line}" for line in check_unchanged(content["data"], inputs.fingerprint)),
    ]
    if changed:
        needed = "it is finished and cannot go on: give name=... anew, or the old values and data"
        raise ConfigError(f"{path} belongs to another run", changed, needed)
    if content.get("tests", {}) != inputs.tests_fingerprint:
        return None
    log.info("%s is done", run.run_folder)
    return content


def write_table(folder: str, table: dict, markdown: str) -> None:
    """Writes table.json, and table.md for a reader."""
    write_text(f"{folder}/table.json", json_text(table))
    write_text(f"{folder}/table.md", markdown)
