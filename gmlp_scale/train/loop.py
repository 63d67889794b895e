"""The training loop: forward and backward for each micro-batch, one update, then logs, checkpoint and evaluation.

The learning rate, the rows and the masks depend on nothing but the step. So the step is the loop's whole state, and the
loop runs from any step to any other. Pretraining and finetuning share it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, OptimizerConfig, TrainConfig
from gmlp_scale.engine.optimizer import learning_rate
from gmlp_scale.tasks.task import BatchLoader
from gmlp_scale.train.metrics import Metrics
from gmlp_scale.train.profiling import profiled
from gmlp_scale.train.recheck import recheck
from gmlp_scale.train.step_guard import StepGuard
from gmlp_scale.train.step_reports import StepReports
from gmlp_scale.train.stragglers import Stragglers
from gmlp_scale.train.time_budget import TimeBudget


@dataclass(frozen=True)
class Progress:
    """Where train() stopped: the last finished step, and the step at which the schedule ends."""

    step: int
    num_steps: int
    lacks_evaluation: bool = False
    """A stop signal cut off the evaluation of `step`. The same command begins with it."""

    @property
    def finished(self) -> bool:
        return self.step == self.num_steps and not self.lacks_evaluation


def due(step: int, every: int) -> bool:
    return step % every == 0


def evaluation_due(step: int, config: TrainConfig) -> bool:
    return due(step, config.evaluate_every_steps) or step == config.num_steps


def train(
    config: TrainConfig,
    optimizer: OptimizerConfig,
    *,
    world: World,
    engine: Engine,
    loader: BatchLoader,
    checkpointer: Checkpointer,
    guard: StepGuard,
    budget: TimeBudget,
    metrics: Metrics,
    evaluate: Callable[[int], dict[str, float]],
    start_step: int,
    seed: int,
) -> Progress:
    """Trains from `start_step` finished steps to the end of the schedule, `stop_after_step` or a stop signal.

    In all three cases it leaves a complete checkpoint of the last finished step. A stop signal cuts off an evaluation.

    Args:
        config, optimizer: the attributes of `budget` with these names.
        evaluate: called on every rank with the number of finished steps; returns what to log, by tag.
        seed: for dropout, together with the step and the rank, so that a resumed run draws the same.

    Raises:
        NotFiniteError, SpikeError: on every rank, naming the step, the ranks and their places in the data order.
            Nothing that is not finite was saved.
        RecheckError: on every rank, with the ranks that compute wrongly.
    """
    step, last_step, lacks_evaluation = start_step, config.last_step, False

    def save() -> None:
        world.note(f"the save of step {step}")
        states = {"guard": {"recent_losses": guard.recent_losses}, **budget.record()}
        with metrics.clock_stopped():
            metrics.checkpoint_stall_seconds += checkpointer.save(engine, step, states)

    reports = StepReports(world)
    stragglers = Stragglers(world, engine.module, loader)
    if start_step and evaluation_due(start_step, config) and not metrics.is_evaluated:
        # A kill after the save cut it off, or this is a branch, whose curve begins here.
        if not metrics.log_evaluation(start_step, evaluate):
            return Progress(start_step, config.num_steps, lacks_evaluation=True)
        metrics.start_up.finish("evaluation")
    metrics.start_clock(loader.wait_seconds)
    batches = staged(loader.steps(start_step, last_step), world.device)
    batches = profiled(batches, start_step, config.profile_steps, metrics.run_dir / "profile", world)
    # `step` counts from 1. A step's rate, rows and seed follow from the number of steps finished before it.
    for step, micro_batches in enumerate(batches, start_step + 1):
        rate = learning_rate(optimizer, step - 1, config.num_steps)
        step_seed = ((seed * config.num_steps + step - 1) * world.size + world.rank) % 2**63
        if config.recheck_every_steps and due(step, config.recheck_every_steps):
            world.note(f"the recheck before step {step}")
            recheck(engine, world, micro_batches[0], step_seed, step)
        torch.manual_seed(step_seed)
        world.note(f"the loss and gradients of step {step}")
        step_loss = accumulate(engine, micro_batches, guard, step, world.device)
        world.note(f"the norm and update of step {step}")
        norm = engine.step(rate)
        reports.send(step, step_loss, norm, rate, stragglers.own_seconds(), budget.spent_seconds())
        if step == start_step + 1:
            world.wait_for_device()
            metrics.log_start_up()

        is_save_due = due(step, checkpointer.config.save_every_steps) or budget.is_decay_due
        is_evaluation_due = evaluation_due(step, config)
        must_know_now = is_save_due or is_evaluation_due or step == last_step or budget.must_know(step)
        for report in reports.read(until_step=step if must_know_now else step - reports.lag):
            guard.see(report)
            metrics.see(report)
            stragglers.see(report)
            budget.see(report)
            is_final = report.step == step and (reports.is_stop or step == last_step)
            if due(report.step, config.log_every_steps) or is_final:
                metrics.log_training(report, loader.wait_seconds)
        if must_know_now and budget.is_decay_due:
            is_save_due = True
            config, optimizer = budget.decide()
            checkpointer.keep(budget.decided_at)  # another decay may branch off there
            metrics.config, last_step = config, config.last_step
        leaving = reports.is_stop or step == last_step
        if is_save_due or leaving:  # before the evaluation, which may fail or take longer than a stopped job has left
            save()
        if is_evaluation_due and not metrics.log_evaluation(step, evaluate):
            save()  # does nothing if it is saved already
            leaving = lacks_evaluation = True
        if leaving:
            break
    world.note("the end of the last save")
    checkpointer.wait()
    return Progress(step, config.num_steps, lacks_evaluation)


def accumulate(
    engine: Engine, micro_batches: list[Any], guard: StepGuard, step: int, device: torch.device
) -> torch.Tensor:
    """Forward and backward of each micro-batch. Returns the mean loss over this rank's rows, 0-d."""
    step_loss = torch.zeros((), device=device)
    for index, micro_batch in enumerate(micro_batches, start=1):
        loss = engine.module(micro_batch)
        step_loss += loss.detach() / len(micro_batches)
        is_last = index == len(micro_batches)
        marked = guard.marked(loss, step_loss, step) if is_last else loss
        engine.backward(marked / len(micro_batches), is_last)
    return step_loss


def staged(steps: Iterable[list[Any]], device: torch.device) -> Iterator[list[Any]]:
    """Each step's micro-batches, which are dataclasses with tensors, on the device.

    The host runs ahead of a GPU, since no step waits for it. So copies from pinned memory on a stream of their own run
    while the step before still computes.
    """
    if device.type != "cuda":
        yield from steps
        return
    copying = torch.cuda.Stream(device)
    for micro_batches in steps:
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(copying):
            on_device = [_pinned(micro_batch).to(device) for micro_batch in micro_batches]
        computing.wait_stream(copying)
        for micro_batch in on_device:
            for tensor in _tensors(micro_batch).values():
                tensor.record_stream(computing)  # so that its memory is not reused before the step has read it
        yield on_device


def _pinned(batch: Any) -> Any:
    return replace(batch, **{name: tensor.pin_memory() for name, tensor in _tensors(batch).items()})


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
