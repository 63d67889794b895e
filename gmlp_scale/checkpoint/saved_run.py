"""Reads what a run of any task has saved: its recipe, and a checkpoint's weights or its trained model.

The run folder is a path or a URL.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError, folder_name, step_of
from gmlp_scale.checkpoint.stores import Checkpoints, checkpoints_of, newest_of, saved_steps
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.engine.masters import model_key
from gmlp_scale.models import with_kernels
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import AnyConfig, load_config
from gmlp_scale.storage.files import read_file, redacted

log = logging.getLogger(__name__)


def read_recipe(run_folder: str | Path, config_class: type[AnyConfig] = RunConfig) -> AnyConfig:
    """The recipe of a run of launch/pretrain.py, of text if no class is given.

    TrainedModelError if there is no run; ConfigError if it cannot be read or is of another task.
    """
    return load_config(config_class, config_path(run_folder))


def config_path(run_folder: str | Path) -> str:
    """A run's config.yaml. TrainedModelError if there is no run."""
    path = f"{run_folder}/config.yaml"
    try:
        read_file(path)
    except (FileNotFoundError, NotADirectoryError):
        needed = "give OUTPUT_DIR/NAME of a run of launch/pretrain.py or launch/finetune.py"
        raise TrainedModelError(redacted(f"no run at {run_folder}: {path} does not exist; {needed}")) from None
    return path


def read_run(run_folder: str | Path, step: int | None = None) -> TrainedModel:
    """Reads a pretraining run's newest good checkpoint, or the one after `step`.

    Raises:
        TrainedModelError: there is no such run, or it has no complete checkpoint, or none of the step.
        ConfigError, CheckpointError: the recipe or the checkpoint cannot be read.
    """
    run = read_recipe(run_folder)
    checkpoint, weights = read_weights(run_folder, step)
    if run.train.micro_batch_size == "auto":
        run = run.with_train(micro_batch_size=checkpoint.details["config"]["train"]["micro_batch_size"])
    return TrainedModel(
        place=redacted(f"{run_folder}/checkpoints/{folder_name(checkpoint.step)}"),
        config=with_kernels(run.model, "auto"),  # the run may have had a GPU that this machine lacks
        head="masked_language_model",
        weights=weights,
        tokenizer_folder=run.data.tokenizer_folder,
        tokenizer_sha256=checkpoint.details["data"]["tokenizer_sha256"],
        details=checkpoint.provenance,
        recipe=run,
    )


def read_weights(run_folder: str | Path, step: int | None = None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A checkpoint as open_checkpoint finds it, and its weights by parameter name."""
    with checkpoints_of(run_folder) as checkpoints:
        checkpoint = open_checkpoint(checkpoints, step)
        return checkpoint, {name: checkpoint.read(model_key(name)) for name in checkpoint.parameters}


def open_checkpoint(checkpoints: Checkpoints, step: int | None = None) -> Checkpoint:
    """The newest good checkpoint of a run of any task, or the one after `step`.

    Raises:
        TrainedModelError: the run has no complete checkpoint, or none of the step.
        CheckpointError: the checkpoint cannot be read.
    """
    if step is None:
        checkpoint, _ = newest_of(checkpoints)
        if checkpoint is None:
            raise _nothing_complete(checkpoints.place)
        return checkpoint
    names = checkpoints.names()
    if folder_name(step) not in names:
        steps = ", ".join(str(step_of(name)) for name in names) or "no step"
        raise TrainedModelError(f"{checkpoints.place} has no checkpoint of step {step}; it has those of {steps}")
    return checkpoints.open(folder_name(step))


def read_all_steps(run_folder: str | Path) -> Iterator[TrainedModel]:
    """Every complete checkpoint of a run, in the order of steps.

    A warning names each damaged one, and each that the run, which may still train, has deleted meanwhile.

    Raises:
        TrainedModelError: no checkpoint is complete.
    """
    found = False
    for step in saved_steps(run_folder):
        try:
            trained = read_run(run_folder, step)
        except (CheckpointError, TrainedModelError, FileNotFoundError) as error:
            if not isinstance(error, CheckpointError) and step in saved_steps(run_folder):
                raise
            log.warning("checkpoint passed over: %s", error)
            continue
        found = True
        yield trained
    if not found:
        raise _nothing_complete(run_folder)


def _nothing_complete(place: str | Path) -> TrainedModelError:
    return TrainedModelError(f"{place} holds no complete checkpoint: train the run first")
