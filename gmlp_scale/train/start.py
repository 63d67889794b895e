"""Which task a recipe has, and where its run begins: at its newest checkpoint, at its branch point or at step 0."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.checkpoint.saved_run import open_checkpoint
from gmlp_scale.checkpoint.stores import LocalCheckpoints, checkpoints_of, newest_of
from gmlp_scale.distributed.world import World, lone_world
from gmlp_scale.engine import TrainConfig
from gmlp_scale.plan.describe import meta_model
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, Recipe, RunConfig, split_step
from gmlp_scale.recipe.reader import load_config, purpose_of, read_recipe_file
from gmlp_scale.recipe.resume import check_continues
from gmlp_scale.tasks.characters import Characters, CharactersConfig
from gmlp_scale.tasks.images import Images, ImagesConfig
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.tasks.task import Task
from gmlp_scale.train.resolve import resolve

_TASK_OF: dict[type[PretrainingRecipe], type[Task]] = {
    RunConfig: Pretraining,
    CharactersConfig: Characters,
    ImagesConfig: Images,
}


def load_recipe(path: str, overrides: Iterable[str] = ()) -> PretrainingRecipe:
    """Reads a recipe of launch/pretrain.py: its `task` says which class checks it. Raises ConfigError."""
    purpose = purpose_of(read_recipe_file(path))
    config_class = next((one for one in _TASK_OF if one.purpose == purpose), RunConfig)
    return load_config(config_class, path, overrides)


def task_of(config: PretrainingRecipe) -> Task:
    """The task of a resolved recipe."""
    return _TASK_OF[type(config)](config)


def check_start(config: PretrainingRecipe) -> None:
    """Compares a run with the checkpoint that it would go on from, as the run will do. Changes nothing.

    It reads only DONE of the run's own checkpoint, and the data only where there is a checkpoint.

    Raises:
        ConfigError: the run would be refused.
        One of USER_ERRORS: the checkpoint or the data cannot be read.
    """
    world = lone_world()
    with checkpoints_of(config.run_folder) as checkpoints:
        newest, _ = newest_of(checkpoints, verify_files=False)
        if newest is None and config.branch_from is None:
            return
        if config.train.micro_batch_size == "auto":
            config = config.with_train(micro_batch_size=1)  # it may change on resume, and is found by trying sizes
        task = task_of(resolve(config, world))
        task.open_loader(world).close()
        starting_point(task.config, task.fingerprint, newest, meta_model(config), world)


def starting_point(
    config: Recipe, fingerprint: dict[str, Any], newest: Checkpoint | None, model: nn.Module, world: World
) -> Checkpoint | None:
    """The checkpoint that a run goes on from: its newest, or else its branch point. None if it begins at step 0.

    All ranks call it together; rank 0 verifies a branch point.

    Args:
        fingerprint: of the run's data.
        newest: the run's own newest checkpoint.
        model: the run's, which may be on the meta device.

    Raises:
        TrainedModelError, CheckpointError: on rank 0, which has no such branch point or finds it damaged.
        ConfigError: the run cannot go on from the checkpoint.
    """
    if newest:
        check_continues(config, fingerprint, newest, model)
        _check_lasts(config, newest.step, f"at least the step of {newest.path}")
        return newest
    if config.branch_from is None:
        return None
    run_folder, step = split_step(config.branch_from)
    checkpoints = LocalCheckpoints(Path(run_folder) / "checkpoints")
    verified = world.on_main(lambda: open_checkpoint(checkpoints, step).path.name)
    checkpoint = Checkpoint.open(checkpoints.directory / verified, verify_files=False)
    check_continues(config, fingerprint, checkpoint, model, is_branch=True)
    _check_lasts(config, checkpoint.step + 1, f"more than the step of {config.branch_from}")
    return checkpoint


def _check_lasts(config: Recipe, num_steps: int, needed: str) -> None:
    """Raises ConfigError if the run has fewer steps."""
    if isinstance(config, PretrainingRecipe) and config.train.num_steps < num_steps:
        raise ConfigError(config.name, [f"train.num_steps: found {config.train.num_steps}; needed: {needed}"])


def check_packages(name: str, train: TrainConfig) -> None:
    """Raises ConfigError if an option needs a package that is not installed."""
    mistakes = []
    if train.tracker and not find_spec(train.tracker):
        needed = f"needed: null, or `pip install {train.tracker}`"
        mistakes.append(f"train.tracker: found {train.tracker}, which is not installed; {needed}")
    if train.log_filters and not find_spec("matplotlib"):
        mistakes.append("train.log_filters: found true without matplotlib; needed: false, or the extra `plot`")
    if mistakes:
        raise ConfigError(name, mistakes)
