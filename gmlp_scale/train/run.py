"""Assembles one run of any task, resumes it where it stopped, and trains.

Here a Task meets the World, its loader, model and Engine, the Checkpointer, Metrics and the loop.
"""

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gmlp_scale
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.format import Checkpoint, folder_name, newest_of
from gmlp_scale.checkpoint.local_checkpoints import LocalCheckpoints
from gmlp_scale.checkpoint.remote_checkpoints import checkpoints_of
from gmlp_scale.checkpoint.remote_folder import RemoteFolder
from gmlp_scale.checkpoint.saved_run import open_checkpoint
from gmlp_scale.distributed.logs import set_up_logging
from gmlp_scale.distributed.world import StopSignalled, World, lone_world, start_world
from gmlp_scale.engine import Engine, TrainConfig, build_engine
from gmlp_scale.plan.describe import meta_model
from gmlp_scale.plan.precision import with_decided_precision
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, Recipe, RunConfig, split_step
from gmlp_scale.recipe.reader import load_config, read_recipe_file
from gmlp_scale.recipe.resume import check_continues
from gmlp_scale.storage.files import is_url, write_text
from gmlp_scale.storage.run_folder import claimed
from gmlp_scale.tasks.characters import Characters, CharactersConfig
from gmlp_scale.tasks.images import Images, ImagesConfig
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.tasks.start_weights import with_decided_start
from gmlp_scale.tasks.task import Task, epochs
from gmlp_scale.train.banner import banner
from gmlp_scale.train.filters import draw_filters, spatial_filters
from gmlp_scale.train.loop import Progress, train
from gmlp_scale.train.metrics import Metrics, StartUp, peak_tflops
from gmlp_scale.train.step_guard import StepGuard
from gmlp_scale.train.time_budget import TimeBudget

log = logging.getLogger(__name__)


def load_recipe(path: str, overrides: Iterable[str] = ()) -> PretrainingRecipe:
    """Reads a recipe of launch/pretrain.py: its `task` says which class checks it. Raises ConfigError."""
    match read_recipe_file(path).get("task"):
        case "characters":
            config_class = CharactersConfig
        case "images":
            config_class = ImagesConfig
        case _:
            config_class = RunConfig
    return load_config(config_class, path, overrides)


def pretrain(config: PretrainingRecipe) -> Progress:
    """Joins the processes that the launcher started and runs a pretraining recipe. Raises as `run_task` does."""
    start_up = StartUp(since=gmlp_scale.IMPORTED_AT_SECONDS)
    start_up.finish("imports")
    with start_world_of(config) as world:
        start_up.finish("process group")
        with world.naming_lost_ranks():
            task = _task_of(config, world)
        return run_task(task, world, start_up)


def check_start(config: PretrainingRecipe) -> None:
    """Compares a run with the checkpoint that it would go on from, as the run will do. Changes nothing.

    It reads only DONE of the run's own checkpoint, and the data only where there is a checkpoint.

    Raises:
        ConfigError: the run would be refused.
        One of USER_ERRORS: the checkpoint or the data cannot be read.
    """
    world = lone_world()
    with checkpoints_of(config.run_folder) as checkpoints:
        newest, _ = newest_of(checkpoints.names(), checkpoints.glance, str(checkpoints))
        if newest is None and config.branch_from is None:
            return
        if config.train.micro_batch_size == "auto":
            config = config.with_micro_batch_size(1)  # it may change on resume, and is found by trying sizes
        task = _task_of(config, world)
        task.open_loader(world).close()
        details = {"config": task.config.to_json(), "data": task.fingerprint}
        starting_point(task.config, newest, details, meta_model(config), world)


def _task_of(config: PretrainingRecipe, world: World) -> Task:
    """The task of a recipe, once what the recipe leaves to the start is decided. All ranks call it together."""
    config = with_decided_precision(config, world)
    match config:
        case CharactersConfig():
            return Characters(config)
        case ImagesConfig():
            return Images(config)
        case _:
            return Pretraining(with_decided_start(config, world))


def start_world_of(config: Recipe) -> World:
    """Joins the processes that the launcher started, as the recipe needs them, and sets up their logs."""
    engine = config.engine
    world = start_world(
        engine.timeout_seconds,
        config.train.device,
        init_group=engine.needs_process_group,
        run=config.run_folder,
        traces_in=config.run_dir.absolute(),
    )
    set_up_logging(world)
    return world


def run_task(task: Task, world: World, start_up: StartUp) -> Progress:
    """Trains from the newest good checkpoint to the end of the schedule, `train.stop_after_step` or a stop signal.

    Raises:
        One of USER_ERRORS: the recipe does not fit the ranks, the data or the checkpoint; another job holds the run
        folder; a shard is corrupt; no checkpoint can be written or read; a loss or norm is not finite.
    """
    config = task.config
    config.rows_per_rank(world.size)
    check_packages(config.name, task.train)
    with ExitStack() as stack, world.naming_lost_ranks():
        remote = _hold_run_folder(config, world, stack)
        loader = task.open_loader(world)
        stack.callback(loader.close)
        start_up.finish("data")
        checkpointer = Checkpointer(
            remote.checkpoints if remote else config.run_dir / "checkpoints",
            config.checkpoint,
            details={"config": task.config.to_json(), "data": task.fingerprint},
            world=world,
            timeout_seconds=config.engine.timeout_seconds / 2,
        )
        stack.callback(checkpointer.close)
        checkpoint = checkpointer.newest()
        recorded = checkpoint.details.get("time_budget") if checkpoint else None
        budget = TimeBudget(task.train, task.optimizer, began=start_up.since, recorded=recorded)
        checkpointer.keep(budget.decided_at)
        with torch.device("meta"):
            model = task.build_model()
        checkpoint = starting_point(config, checkpoint, checkpointer.details, model, world)
        start_up.finish("checkpoint")
        log.info(banner(task, world, budget, checkpoint))

        engine = build_engine_of(task, world, is_new=checkpoint is None)
        stack.callback(engine.close)
        start_up.finish("model and engine")
        start_step = 0
        if checkpoint:
            checkpoint.load_into(engine)
            start_step = checkpoint.step
        # Nothing is written before this: a start that was refused leaves no run folder.
        world.on_main(lambda: write_text(f"{config.run_folder}/config.yaml", config.to_yaml()))
        start_up.finish("checkpoint")
        metrics = _build_metrics(task, budget.config, world, start_step, start_up)
        stack.callback(metrics.close)
        guard = StepGuard(
            task.train,
            world,
            config.run_dir,
            checkpoint.details["guard"]["recent_losses"] if checkpoint else [],
            batch_printer=config.batch_printer,
            may_skip="train.on_not_finite" in config.fields(),
            data_changes=config.data_changes,
        )
        stack.callback(guard.close)
        start_up.finish("metrics")
        progress = train(
            budget.config,
            budget.optimizer,
            world=world,
            engine=engine,
            loader=loader,
            checkpointer=checkpointer,
            guard=guard,
            budget=budget,
            metrics=metrics,
            evaluate=lambda step: _evaluate(task, engine, world, metrics, step),
            start_step=start_step,
            seed=config.seed,
        )
        return _finish(task, engine, world, progress)


def _finish(task: Task, engine: Engine, world: World, progress: Progress) -> Progress:
    """Writes the results of a run that came to its end. Returns how far it is, which a stop signal may change."""
    if progress.finished:
        try:
            task.finish(engine, world, progress.step)
        except StopSignalled:
            progress = replace(progress, lacks_evaluation=True)
    if progress.finished:
        log.info("finished at step %d: %s", progress.step, task.config.run_folder)
    else:
        log.info("stopped after step %d of %d; the same command resumes", progress.step, progress.num_steps)
    return progress


def _hold_run_folder(config: Recipe, world: World, stack: ExitStack) -> RemoteFolder | None:
    """Claims the run folder until `stack` ends. For one at a URL, also makes its local folders, and returns it."""
    if not is_url(config.run_folder):
        world.on_main(lambda: stack.enter_context(claimed(config.run_folder)))
        return None
    remote = RemoteFolder(config.run_folder, config.run_dir)
    world.on_main(lambda: stack.enter_context(remote.claimed()))
    if world.local_rank == 0:
        stack.enter_context(remote.local_folder())
    world.on_main(lambda: stack.enter_context(remote.mirrored()))
    return remote


def build_engine_of(task: Task, world: World, *, is_new: bool) -> Engine:
    """The engine of a task's model. Only a new run's weights are initialised: a checkpoint will fill the others."""
    model = task.build_model()
    if is_new:
        task.initialise(model)
    return build_engine(model, world, engine=task.config.engine, train=task.train, optimizer=task.optimizer)


def starting_point(
    config: Recipe, newest: Checkpoint | None, details: dict[str, Any], model: nn.Module, world: World
) -> Checkpoint | None:
    """The checkpoint that a run goes on from: its newest, or else its branch point. None if it begins at step 0.

    All ranks call it together; rank 0 verifies a branch point.

    Args:
        newest: the run's own newest checkpoint.
        details: those that the run's checkpoints will have.
        model: the run's, which may be on the meta device.

    Raises:
        TrainedModelError, CheckpointError: on rank 0, which has no such branch point or finds it damaged.
        ConfigError: the run cannot go on from the checkpoint.
    """
    if newest:
        place, misfit = str(newest.path), newest.misfit(model)
        check_continues(config, place, newest.details, details, step=newest.step, misfit=misfit)
        return newest
    if isinstance(config, PretrainingRecipe) and config.branch_from:
        return _branch_point(config, details, model, world)
    return None


def _branch_point(config: PretrainingRecipe, details: dict[str, Any], model: nn.Module, world: World) -> Checkpoint:
    run_folder, step = split_step(config.branch_from)
    checkpoints = LocalCheckpoints(Path(run_folder) / "checkpoints")
    world.on_main(lambda: open_checkpoint(checkpoints, run_folder, step))
    checkpoint = Checkpoint.open(checkpoints.directory / folder_name(step), verify_files=False)
    check_continues(
        config,
        config.branch_from,
        checkpoint.details,
        details,
        step=checkpoint.step,
        is_branch=True,
        misfit=checkpoint.misfit(model),
    )
    if config.train.num_steps <= checkpoint.step:
        found = f"found {config.train.num_steps}; needed: more than the step of {config.branch_from}"
        raise ConfigError(config.name, [f"train.num_steps: {found}"])
    return checkpoint


def _evaluate(task: Task, engine: Engine, world: World, metrics: Metrics, step: int) -> dict[str, float]:
    values = task.evaluate(engine, world, step)
    if task.train.log_filters:
        filters = spatial_filters(engine.full_weights())  # all ranks take part; only rank 0 gets them
        if world.is_main:
            metrics.add_picture(step, "filters", draw_filters(filters))
    return values


def check_packages(name: str, train: TrainConfig) -> None:
    """Raises ConfigError if an option needs a package that is not installed."""
    mistakes = []
    if train.tracker and not find_spec("wandb"):
        mistakes.append("train.tracker: found wandb, which is not installed; needed: null, or the extra `wandb`")
    if train.log_filters and not find_spec("matplotlib"):
        mistakes.append("train.log_filters: found true without matplotlib; needed: false, or the extra `plot`")
    if mistakes:
        raise ConfigError(name, mistakes)


def _build_metrics(task: Task, config: TrainConfig, world: World, start_step: int, start_up: StartUp) -> Metrics:
    return Metrics(
        task.config.run_dir,
        world,
        config,
        task.config.fields(),
        start_step=start_step,
        tokens_per_step=task.tokens_per_step,
        epochs=lambda step: epochs(task, step),
        flops_per_step=task.flops_per_step,
        peak_tflops_per_device=config.peak_tflops_per_device or peak_tflops(world.device, config.precision),
        start_up=start_up,
    )
