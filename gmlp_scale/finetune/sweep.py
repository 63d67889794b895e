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

import torch

from gmlp_scale.distributed.world import World
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import Finetuning, Inputs, by_name, finetune, read_json, write_json
from gmlp_scale.models import AmlpConfig, GmlpConfig, ModelConfig, TransformerConfig, with_kernels
from gmlp_scale.plan.describe import describe_resume, describe_states, short
from gmlp_scale.plan.rank_bytes import state_bytes
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.resume import changed_fields, check_unchanged
from gmlp_scale.storage.files import redacted, write_text
from gmlp_scale.tasks.table import TASKS
from gmlp_scale.train.step_guard import NotFiniteError

log = logging.getLogger(__name__)

VOCAB_SIZE = 32_000
"""The paper's. A model with another vocabulary is still compared with the paper's scores."""
_LONG = {"d_ffn": 3072, "sequence_length": 512, "vocab_size": VOCAB_SIZE}
_WIDE = _LONG | {"d_ffn": 4096}
_SHORT = _LONG | {"sequence_length": 128}
_SHORT_BERT = _SHORT | {"d_model": 768, "num_heads": 12, "positions": "relative"}

_COLUMNS = (
    ("sst2", "accuracy"),
    ("mnli", "accuracy"),
    ("mnli", "accuracy_mismatched"),
    ("squad_v1", "f1"),
    ("squad_v2", "f1"),
)
"""The task and the score of each of the numbers below. Of the short models only the first two are known.
They are in percent: accuracy for SST-2 and for both development sets of MNLI, F1 for SQuAD."""
_MODELS: dict[ModelConfig, tuple[str, tuple[float, ...]]] = {
    TransformerConfig(num_blocks=12, d_model=768, num_heads=12, positions="absolute", **_LONG): (
        "BERT base", (93.8, 85.6, 85.7, 90.2, 78.6)),
    GmlpConfig(num_blocks=48, d_model=512, **_LONG): ("gMLP base", (94.2, 83.7, 84.1, 86.7, 70.1)),
    AmlpConfig(num_blocks=36, d_model=512, d_attn=64, **_LONG): ("aMLP base", (93.4, 85.9, 85.8, 90.7, 80.9)),
    TransformerConfig(num_blocks=24, d_model=1024, num_heads=16, positions="absolute", **_WIDE): (
        "BERT large", (94.3, 87.0, 87.4, 92.0, 81.0)),
    GmlpConfig(num_blocks=96, d_model=768, **_LONG): ("gMLP large", (94.8, 86.2, 86.5, 89.5, 78.3)),
    AmlpConfig(num_blocks=72, d_model=768, d_attn=128, **_LONG): ("aMLP large", (94.8, 88.4, 88.4, 92.2, 85.4)),
    GmlpConfig(num_blocks=144, d_model=1024, **_WIDE): ("gMLP xlarge", (95.6, 87.7, 87.7, 90.9, 82.1)),
    TransformerConfig(num_blocks=6, **_SHORT_BERT): ("Transformer, 6+6 layers", (90.4, 81.5)),
    TransformerConfig(num_blocks=12, **_SHORT_BERT): ("Transformer, 12+12 layers", (91.3, 83.3)),
    TransformerConfig(num_blocks=24, **_SHORT_BERT): ("Transformer, 24+24 layers", (92.1, 85.2)),
    TransformerConfig(num_blocks=48, **_SHORT_BERT): ("Transformer, 48+48 layers", (92.8, 86.3)),
    GmlpConfig(num_blocks=18, d_model=512, **_SHORT): ("gMLP, 18 layers", (91.2, 77.7)),
    GmlpConfig(num_blocks=36, d_model=512, **_SHORT): ("gMLP, 36 layers", (92.3, 80.9)),
    GmlpConfig(num_blocks=72, d_model=512, **_SHORT): ("gMLP, 72 layers", (93.5, 82.8)),
    GmlpConfig(num_blocks=144, d_model=512, **_SHORT): ("gMLP, 144 layers", (95.1, 84.6)),
}  # fmt: skip


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
    tried, points = [], members(run, grid=grid)
    for point in points:
        scores = _scores(point, inputs, world, may_diverge=len(points) > 1)
        if scores is None:
            return None
        tried.append(scores)
    main_score = run.task_row.main_score
    finite = [scores for scores in tried if scores["scores"]]
    if not finite:
        raise NotFiniteError(f"{run.run_folder}: all points of the grid diverged; give a lower grid.peak_learning_rate")
    picked = max(finite, key=lambda scores: scores["scores"]["dev"][main_score])  # the first of equals
    seeds = [picked]
    for seed in range(run.seed + 1, run.seed + num_seeds):
        scores = _scores(member(run, _point(picked), seed), inputs, world, may_diverge=False)
        if scores is None:
            return None
        seeds.append(scores)
    table = build_table(run, inputs, tried, seeds)
    world.on_main(lambda: write_table(run.run_folder, table, to_markdown(table)))
    return table


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
    config = with_kernels(inputs.pretrained.config, "auto").model_copy(update={"vocab_size": VOCAB_SIZE})
    sizes = run.task_row.official_sizes
    is_official = all(rows.num_examples == sizes.get(part, rows.num_examples) for part, rows in inputs.rows.items())
    if config not in _MODELS or not is_official or not run.pretrained:
        return None
    name, numbers = _MODELS[config]
    scores = {score: number for (task, score), number in zip(_COLUMNS, numbers, strict=False) if task == run.task}
    return (name, scores) if scores else None


def to_markdown(table: dict) -> str:
    """The table for a reader, with accuracy in percent, as in the paper."""
    task = TASKS[table["task"]]
    examples = ", ".join(f"{part} {number:,}" for part, number in table["num_examples"].items())
    start = "pretrained" if table["pretrained"] else "not pretrained"
    lines = [
        f"# {table['task']}: {table['model']} ({start})",
        "",
        f"Batch {table['global_batch_size']}, rate {table['peak_learning_rate']:g}, {len(table['seeds'])} seeds "
        f"({', '.join(map(str, table['seeds']))}); examples: {examples}. Scores of the last weights.",
        "",
    ]
    paper = table["paper"]["scores_in_percent"] if table["paper"] else {}
    paper_column = f" paper, {table['paper']['model']} |" if paper else ""
    lines += [f"| score | median | minimum | maximum |{paper_column}", "| --- " * (4 + bool(paper)) + "|"]
    for name, values in table["scores"].items():
        shown = [task.shown(name, values[kind]) for kind in ("median", "minimum", "maximum")]
        lines.append(f"| {' | '.join([name, *shown, *([str(paper.get(name, ''))] if paper else [])])} |")
    if len(table["grid"]) > 1:
        lines += ["", f"| batch | rate | dev {task.main_score} |", "| --- | --- | --- |"]
        for point in table["grid"]:
            scores = point["scores"]
            score = task.shown(task.main_score, scores[task.main_score]) if scores else "diverged"
            lines.append(f"| {point['global_batch_size']} | {point['peak_learning_rate']:g} | {score} |")
    return "\n".join(lines) + "\n"


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
    states = state_bytes(
        run.engine, model, task.optimizer, run.train.precision, world_size, accumulates=num_micro_batches > 1
    )
    flops, tokens = task.flops_per_step.last, task.tokens_per_step.last
    lines = [
        run.to_yaml(),
        f"model                   {inputs.pretrained.config}",
        f"ranks                   {world_size}, {micro_batches}",
        f"parameters              {sum(parameter.numel() for parameter in model.parameters()):,}",
        f"FLOPs per step          {short(flops)} ({short(flops / tokens)} per token)",
        f"tokens per step         {tokens:,}",
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
        world.on_main(lambda: write_json(f"{run.run_folder}/scores.json", content))
        return content


def _finished(run: FinetuneConfig, inputs: Inputs, world: World) -> dict | None:
    """The content of scores.json of a run that is done. ConfigError if it had another recipe, model or data.

    A run that has predicted other test parts, or none, is not done: its last checkpoint predicts those of now.
    """
    path = f"{run.run_folder}/scores.json"
    content = world.on_main(lambda: read_json(path))
    if content is None:
        return None
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
    write_json(f"{folder}/table.json", table)
    write_text(f"{folder}/table.md", markdown)
