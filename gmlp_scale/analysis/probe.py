"""Finetunes a checkpoint for a few steps: its dev score shows how pretraining is going."""

import tempfile
from pathlib import Path
from typing import Any

from gmlp_scale.analysis.tensorboard import open_writer
from gmlp_scale.checkpoint.saved_run import read_recipe, read_run
from gmlp_scale.distributed.world import World
from gmlp_scale.export.folder import export_checkpoint
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import finetune
from gmlp_scale.finetune.inputs import read_inputs
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config, package_recipes
from gmlp_scale.tasks.records import missing_file

BUDGET = ("train.num_epochs=null", "train.num_steps=200", "train.evaluate_every_steps=200")
_OWN = ("model", "task", "name", "output_dir", "engine.kind", "train.device", "train.stop_after_step")


def load_probe(task: str, overrides: list[str], run_folder: str | Path) -> FinetuneConfig:
    """The task's finetuning recipe with BUDGET in place of its own length; `overrides` win over both.

    It is the package's recipe with the task's name, else GLUE's.

    Raises:
        ConfigError: the recipe or an override has a mistake, an override sets what a probe decides itself, the rows
            are longer than those of the run at `run_folder`, or files of the data are missing.
        TrainedModelError: there is no such run.
    """
    recipe = task if task in package_recipes() else "glue"
    if own := [override for override in overrides if override.partition("=")[0] in _OWN]:
        raise ConfigError(recipe, [f"{override}: a probe decides this by itself; leave it out" for override in own])
    config = load_config(FinetuneConfig, recipe, [*BUDGET, *overrides, f"task={task}"])
    mistakes, longest = [], read_recipe(run_folder).model.sequence_length
    if config.data.sequence_length > longest:
        found = f"found {config.data.sequence_length}; the run at {run_folder} takes at most {longest}"
        mistakes.append(f"data.sequence_length: {found}")
    for part in ("train", *config.parts):
        if missing := missing_file(config.data.source(part), part, config.task_row.data_set):
            mistakes.append(missing)
    if mistakes:
        raise ConfigError(recipe, mistakes)
    config.rows_per_rank(1)
    return config


def add_probe_scores(content: dict[str, Any], run_folder: str | Path, config: FinetuneConfig, world: World) -> None:
    """Exports and finetunes each model of heldout.evaluate_models in a temporary folder.

    Adds its dev score to `content` and to RUN_DIR/tensorboard/probe. Raises one of errors.USER_ERRORS.
    """
    score = config.task_row.main_score
    name = f"probe_{config.task}_{score}"
    for of_model in content["models"]:
        step = of_model["step"]
        with tempfile.TemporaryDirectory() as folder:
            export_checkpoint(read_run(run_folder, step), run_folder, Path(folder, "export"))
            one = config.model_copy(update={"output_dir": folder, "model": f"{folder}/export"})
            of_model[name] = finetune(one, read_inputs(one), world)["scores"]["dev"][score]
        with open_writer(f"{run_folder}/tensorboard/probe") as writer:
            writer.add_scalar(f"eval/{name}", of_model[name], step)
