"""GLUE (Wang et al. 2019): a sweep of one recipe for every task, and the usual table.

WNLI is left out, as in BERT's table: its training and development sets share sentences, mostly with opposite labels, so
a model that fits the one may do worse than guessing on the other.
"""

import functools
import json
import statistics
from pathlib import Path

from gmlp_scale.distributed.world import World
from gmlp_scale.export.card import render
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import read_inputs
from gmlp_scale.finetune.sweep import best_of, member, sweep, write_table
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config
from gmlp_scale.storage.files import read_file, write_text
from gmlp_scale.tasks.table import TASKS

FOLDERS = {name: folder for name, task in TASKS.items() if (folder := task.data_set.glue_folder)}
"""The tasks in the order of the benchmark's table, and their folders."""
FROM_MNLI = ("mrpc", "stsb", "rte")
"""They have few examples, so RoBERTa (Liu et al. 2019) starts them from the model finetuned on MNLI."""
_OWN = ("task", "data.train", "data.dev", "data.dev_mismatched", "data.test", "data.test_mismatched")


def glue_runs(recipe: str, overrides: list[str], folder: Path) -> list[FinetuneConfig]:
    """The recipe's run for each task, in a folder of the task inside the recipe's folder. Test files are optional.

    Raises:
        ConfigError: the recipe or an override has a mistake, an override sets what `folder` decides, or files are
            missing.
    """
    if own := [override for override in overrides if override.partition("=")[0] in _OWN]:
        raise ConfigError(recipe, [f"{override}: --glue decides this; leave it out" for override in own])
    sources = {task: _sources(task, folder) for task in FOLDERS}
    found = [(part, path) for of_task in sources.values() for part, path in of_task.items()]
    missing = [f"{path} is missing" for part, path in found if not part.startswith("test") and not path.exists()]
    if missing:
        raise ConfigError(f"--glue {folder}", missing, "needed: GLUE's folders as they are downloaded, CoLA to RTE")
    runs = []
    for task, paths in sources.items():
        given = [f"data.{part}={json.dumps(str(path))}" for part, path in paths.items() if path.exists()]
        run = load_config(FinetuneConfig, recipe, [*overrides, f"task={task}", *given])
        runs.append(run.model_copy(update={"output_dir": run.run_folder, "name": task}))
    return runs


def _sources(task: str, folder: Path) -> dict[str, Path]:
    names = {part: part for part in TASKS[task].data_set.splits}
    if task == "mnli":
        names |= {"dev": "dev_matched", "test": "test_matched"}
    return {part: folder / FOLDERS[task] / f"{name}.tsv" for part, name in names.items()}


def run_glue(runs: list[FinetuneConfig], world: World, *, num_seeds: int, grid: bool, from_mnli: bool) -> dict | None:
    """A sweep for each run of glue_runs. Writes submission/, table.json and table.md beside the tasks' folders.

    The submission is from the seed with the best dev score. Returns the content of table.json, or None if a sweep was
    stopped.

    Args:
        from_mnli: MNLI comes first, and the tasks of FROM_MNLI start from its last weights, of the recipe's seed,
            instead of from the recipe's model. More seeds leave that start as it is.

    Raises:
        One of errors.USER_ERRORS.
    """
    tables, mnli_folder = {}, ""
    for run in sorted(runs, key=lambda run: from_mnli and run.task != "mnli"):
        if from_mnli and run.task in FROM_MNLI:
            run = run.model_copy(update={"model": f"{mnli_folder}/last"})
        table = sweep(run, read_inputs(run), world, num_seeds=num_seeds, grid=grid)
        if table is None:
            return None
        tables[run.task] = table
        if run.task == "mnli":
            mnli_folder = member(run, table, run.seed).run_folder
        world.on_main(functools.partial(_write_submission, run, table))
    content = build_glue_table(tables, from_mnli=from_mnli)
    world.on_main(lambda: write_table(runs[0].output_dir, content, to_markdown(content)))
    return content


def _write_submission(run: FinetuneConfig, table: dict) -> None:
    """Copies the test predictions of the seed with the best dev score, the first of equals, to one folder.

    GLUE's server takes the folder as a zip.
    """
    by_seed = table["scores"][run.task_row.main_score]["by_seed"]
    best_folder = member(run, table, table["seeds"][best_of(by_seed)]).run_folder
    for part in run.parts:
        if part.startswith("test"):
            name = run.task_row.submission(part)
            text = read_file(f"{best_folder}/predictions/{part}/{name}").decode()
            write_text(f"{run.output_dir}/submission/{name}", text)


def build_glue_table(tables: dict[str, dict], *, from_mnli: bool) -> dict:
    """The content of table.json: for each task the median over its seeds of every official score.

    The average is GLUE's: each task counts once, by the mean of its scores.

    Args:
        tables: task -> what `sweep` returned.
    """
    parts = {}
    for kind in ("dev", "test"):
        medians = {task: _medians(task, kind, tables[task]) for task in FOLDERS}
        if any(medians.values()):
            means = [statistics.mean(scores.values()) for scores in medians.values() if scores]
            average = statistics.mean(means) if len(means) == len(FOLDERS) else None
            parts[kind] = {"scores": medians, "average": average}
    facts = {name: tables["cola"][name] for name in ("model", "pretrained")}
    return {**facts, "from_mnli": from_mnli, "num_seeds": len(tables["cola"]["seeds"]), **parts}


def _medians(task: str, kind: str, table: dict) -> dict[str, float]:
    """The medians of the official scores on all dev or test parts, by name. Empty if the parts had no labels."""
    suffixes = [f"_{part}".removeprefix("_dev") for part in TASKS[task].data_set.parts if part.startswith(kind)]
    names = [f"{score.__name__}{suffix}" for suffix in suffixes for score in TASKS[task].scores]
    return {name: table["scores"][name]["median"] for name in names if name in table["scores"]}


def to_markdown(content: dict) -> str:
    """The usual table, in percent: the scores of a task in one cell, MNLI's as matched/mismatched."""
    names = {task: "/".join(score.__name__ for score in TASKS[task].scores) for task in FOLDERS}
    names["mnli"] += ", m/mm"
    return render(
        "glue.md",
        package="gmlp_scale.finetune",
        table=content,
        columns=[(folder, names[task]) for task, folder in FOLDERS.items()],
        from_mnli=[FOLDERS[task] for task in FROM_MNLI],
        shown=lambda scores: "/".join(f"{100 * score:.1f}" for score in scores),
    )
