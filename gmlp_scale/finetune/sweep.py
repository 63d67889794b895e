"""Many finetuning runs of one recipe: its grid of batch and rate, and seeds; one table at the end.

Every run has a folder of its own under the recipe's, so the same command again skips what is done, resumes what is not,
and writes table.md and table.json once all is there.
"""

import json
import logging
import statistics
from pathlib import Path

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import by_name, check_continues, finetune
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.finetune.paper import published
from gmlp_scale.train.run_folder import write_text
from gmlp_scale.world import World

log = logging.getLogger(__name__)


def members(run: FinetuneConfig, *, grid: bool) -> list[FinetuneConfig]:
    """The runs of the grid with the recipe's seed; without `grid` the recipe's own point alone."""
    if not grid:
        return [member(run, run.train.global_batch_size, run.optimizer.peak_learning_rate, run.seed)]
    return [
        member(run, batch_size, rate, run.seed)
        for batch_size in run.grid.global_batch_size
        for rate in run.grid.peak_learning_rate
    ]


def member(run: FinetuneConfig, global_batch_size: int, peak_learning_rate: float, seed: int) -> FinetuneConfig:
    """The recipe at a point of the grid and with a seed, in a folder of its own."""
    return run.model_copy(
        update={
            "output_dir": run.run_dir,
            "name": f"batch_{global_batch_size}_rate_{peak_learning_rate:g}_seed_{seed}",
            "seed": seed,
            "train": run.train.model_copy(update={"global_batch_size": global_batch_size}),
            "optimizer": run.optimizer.model_copy(update={"peak_learning_rate": peak_learning_rate}),
        }
    )


def sweep(run: FinetuneConfig, inputs: Inputs, world: World, *, num_seeds: int, grid: bool) -> dict | None:
    """Runs the grid with the recipe's seed, picks the point with the best dev score, and runs the other seeds there.

    The score is that of the last weights, not of the best evaluation. Returns the content of table.json, or None where
    it was stopped.

    Raises:
        One of finetune.run.USER_ERRORS, such as ConfigError where a finished run had another recipe or other data.
    """
    tried = []
    for candidate in members(run, grid=grid):
        scores = _finished(candidate, inputs, world) or finetune(candidate, inputs, world)
        if scores is None:
            return None
        tried.append(scores)
    main_score = run.task_row.main_score
    picked = max(tried, key=lambda scores: scores["scores"]["dev"][main_score])  # the first of equals
    batch_size = picked["config"]["train"]["global_batch_size"]
    rate = picked["config"]["optimizer"]["peak_learning_rate"]
    seeds = [picked]
    for seed in range(run.seed + 1, run.seed + num_seeds):
        other = member(run, batch_size, rate, seed)
        scores = _finished(other, inputs, world) or finetune(other, inputs, world)
        if scores is None:
            return None
        seeds.append(scores)
    table = build_table(run, inputs, tried, seeds)
    world.on_main(lambda: _write_table(run.run_dir, table))
    return table


def build_table(run: FinetuneConfig, inputs: Inputs, tried: list[dict], seeds: list[dict]) -> dict:
    """The content of table.json; scores as metrics.jsonl has them: accuracy from 0 to 1, SQuAD's in percent."""
    of_seeds = [by_name(scores["scores"]) for scores in seeds]
    chosen = seeds[0]["config"]
    columns = {name: [scores[name] for scores in of_seeds] for name in of_seeds[0]}
    paper = published(run, inputs)
    return {
        "task": run.task,
        "model": str(run.model),
        "pretrained": run.pretrained,
        "global_batch_size": chosen["train"]["global_batch_size"],
        "peak_learning_rate": chosen["optimizer"]["peak_learning_rate"],
        "num_examples": seeds[0]["num_examples"],
        "seeds": [scores["seed"] for scores in seeds],
        "scores": {
            name: {
                "median": statistics.median(values),
                "minimum": min(values),
                "maximum": max(values),
                "by_seed": values,
            }
            for name, values in columns.items()
        },
        "grid": [
            {
                "global_batch_size": scores["config"]["train"]["global_batch_size"],
                "peak_learning_rate": scores["config"]["optimizer"]["peak_learning_rate"],
                "scores": by_name(scores["scores"]),
            }
            for scores in tried
        ],
        "paper": {"model": paper[0], "scores_in_percent": paper[1]} if paper else None,
    }


def to_markdown(table: dict, main_score: str) -> str:
    """The table for a reader; accuracies in percent, as the paper prints them."""
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
        shown = [_shown(name, values[kind]) for kind in ("median", "minimum", "maximum")]
        lines.append(f"| {' | '.join([name, *shown, *([str(paper.get(name, ''))] if paper else [])])} |")
    if len(table["grid"]) > 1:
        lines += ["", "| batch | rate | dev " + main_score + " |", "| --- | --- | --- |"]
        for point in table["grid"]:
            score = _shown(main_score, point["scores"][main_score])
            lines.append(f"| {point['global_batch_size']} | {point['peak_learning_rate']:g} | {score} |")
    return "\n".join(lines) + "\n"


def _shown(name: str, value: float) -> str:
    if name.startswith("accuracy"):
        return f"{100 * value:.2f}"
    return f"{value}" if isinstance(value, int) else f"{value:.4f}" if name.startswith("loss") else f"{value:.2f}"


def _finished(run: FinetuneConfig, inputs: Inputs, world: World) -> dict | None:
    """scores.json of a run that is done. ConfigError if it was of another recipe, model or data."""
    path = run.run_dir / "scores.json"
    content = world.broadcast(json.loads(path.read_text(encoding="utf-8")) if world.is_main and path.exists() else None)
    if content is None:
        return None
    check_continues(run, str(path), content, {"config": run.model_dump(mode="json"), "data": inputs.fingerprint})
    log.info("%s is done", run.run_dir)
    return content


def _write_table(folder: Path, table: dict) -> None:
    main_score = "accuracy" if "accuracy" in table["scores"] else "f1"
    write_text(folder / "table.json", json.dumps(table, indent=2) + "\n")
    write_text(folder / "table.md", to_markdown(table, main_score))
