"""Assembles one run of any task, resumes it where it stopped, and trains.

Here a Task meets the World, its loader, model and Engine, the Checkpointer, the monitors and the loop.
"""

import logging
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

import torch

import gmlp_scale
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.stores import Checkpoints, LocalCheckpoints, RemoteCheckpoints
from gmlp_scale.distributed.world import StopSignalled, World
from gmlp_scale.engine import Engine, build_engine
from gmlp_scale.fields import flatten
from gmlp_scale.recipe.config import PretrainingRecipe, Recipe
from gmlp_scale.storage.files import is_url, write_text
from gmlp_scale.storage.run_folder import RemoteFolder, claimed
from gmlp_scale.tasks.task import Task
from gmlp_scale.train.agreement import require_agreement, start_world_of
from gmlp_scale.train.banner import banner
from gmlp_scale.train.loop import Progress, Run, train
from gmlp_scale.train.metrics import Metrics, StartUp
from gmlp_scale.train.resolve import resolve
from gmlp_scale.train.start import check_packages, starting_point, task_of
from gmlp_scale.train.step_guard import StepGuard
from gmlp_scale.train.step_reports import StepReports
from gmlp_scale.train.stragglers import Stragglers
from gmlp_scale.train.time_budget import build_schedule

log = logging.getLogger(__name__)


def pretrain(config: PretrainingRecipe) -> Progress:
    """Joins the processes that the launcher started and runs a pretraining recipe. Raises as `run_task` does."""
    start_up = StartUp(since=gmlp_scale.IMPORTED_AT_SECONDS)
    start_up.finish("imports")
    with start_world_of(config) as world, world.naming_lost_ranks():
        start_up.finish("process group")
        return run_task(task_of(resolve(config, world)), world, start_up)


def run_task(task: Task, world: World, start_up: StartUp) -> Progress:
    """Trains from the newest good checkpoint to the end of the schedule, `train.stop_after_step` or a stop signal.

    Raises:
        One of USER_ERRORS: the ranks found different data; the recipe does not fit the ranks, the data or the
        checkpoint; another job holds the run folder; a shard is corrupt; no checkpoint can be written or read; a loss
        or norm is not finite.
    """
    config = task.config
    config.rows_per_rank(world.size)
    check_packages(config.name, task.train)
    with ExitStack() as stack, world.naming_lost_ranks():
        place = _hold_run_folder(config, world, stack)
        loader = task.open_loader(world)
        stack.callback(loader.close)
        require_agreement(world, dict(flatten({"data": task.fingerprint})))
        start_up.finish("data")
        details = {"config": config.to_json(), "data": task.fingerprint}
        seconds = config.engine.timeout_seconds / 2
        checkpointer = Checkpointer(place, config.checkpoint, details=details, world=world, timeout_seconds=seconds)
        stack.callback(checkpointer.close)
        newest = checkpointer.newest()
        with torch.device("meta"):
            model = task.build_model()
        checkpoint = starting_point(config, task.fingerprint, newest, model, world)
        start_up.finish("checkpoint")
        schedule = build_schedule(task.train, task.optimizer, newest.details if newest else {})
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        log.info(banner(task, world, schedule, checkpoint, num_parameters))

        engine = build_engine_of(task, world, is_new=checkpoint is None)
        stack.callback(engine.close)
        start_up.finish("model and engine")
        if checkpoint:
            checkpoint.load_into(engine)
        start_step = checkpoint.step if checkpoint else 0
        # Nothing is written before this: a start that was refused leaves no run folder.
        world.on_main(lambda: write_text(f"{config.run_folder}/config.yaml", config.to_yaml()))
        start_up.finish("checkpoint")
        metrics = Metrics(task, loader, schedule, world, start_step=start_step, start_up=start_up)
        stack.callback(metrics.close)
        guard = StepGuard(config, task.train, world, checkpoint.details["guard"] if checkpoint else None)
        stack.callback(guard.close)
        stragglers = Stragglers(world, engine.module, loader)
        start_up.finish("metrics")
        run = Run(
            task=task,
            world=world,
            engine=engine,
            loader=loader,
            checkpointer=checkpointer,
            schedule=schedule,
            guard=guard,
            metrics=metrics,
            reports=StepReports(world, stragglers.own_seconds, began=start_up.since),
            monitors=(guard, metrics, stragglers, schedule),
        )
        try:
            return _finish(run, train(run, start_step))
        except Exception as error:
            world.say_failed(error)
            raise


def _finish(run: Run, progress: Progress) -> Progress:
    """Writes the results of a run that came to its end. Returns how far it is, which a stop signal may change."""
    if progress.finished:
        try:
            run.task.finish(run.engine, run.world, progress.step)
        except StopSignalled:
            progress = replace(progress, lacks_evaluation=True)
    if progress.finished:
        log.info("finished at step %d: %s", progress.step, run.task.config.run_folder)
    else:
        log.info("stopped after step %d of %d; the same command resumes", progress.step, progress.num_steps)
    return progress


def _hold_run_folder(config: Recipe, world: World, stack: ExitStack) -> Checkpoints:
    """Claims the run folder until `stack` ends, with local folders for one at a URL. Returns where checkpoints go."""

    def hold(context: AbstractContextManager) -> None:
        stack.enter_context(context)

    if not is_url(config.run_folder):
        world.on_main(lambda: hold(claimed(config.run_folder)))
        return LocalCheckpoints(config.run_dir / "checkpoints")
    remote = RemoteFolder(config.run_folder, config.run_dir)
    world.on_main(lambda: hold(remote.held()))
    is_first_of_host = world.local_rank == 0 and not world.is_main
    world.on_all(lambda: hold(remote.local_folder()) if is_first_of_host else None)
    return RemoteCheckpoints(f"{remote.url}/checkpoints", remote.local / "checkpoints", remote)


def build_engine_of(task: Task, world: World, *, is_new: bool) -> Engine:
    """The engine of a task's model. Only a new run's weights are initialised: a checkpoint will fill the others."""
    model = task.build_model()
    if is_new:
        task.initialise(model)
    return build_engine(model, world, engine=task.config.engine, train=task.train, optimizer=task.optimizer)
