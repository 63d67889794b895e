"""The training loop: forward and backward for each micro-batch, one update, then logs, checkpoint and evaluation.

The learning rate, the rows and the masks depend on nothing but the step. So the step is the loop's whole state, and the
loop runs from any step to any other. Pretraining and finetuning share it.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.errors import OtherRankError
from gmlp_scale.tasks.task import BatchLoader, Task
from gmlp_scale.train.batches import profiled, staged, without_end
from gmlp_scale.train.metrics import Metrics, due
from gmlp_scale.train.recheck import recheck
from gmlp_scale.train.schedule import Schedule
from gmlp_scale.train.step_guard import StepGuard
from gmlp_scale.train.step_reports import StepReport, StepReports
from gmlp_scale.train.stragglers import Stragglers


@dataclass(frozen=True)
class Run:
    """What a run consists of. run.py puts it together."""

    task: Task
    world: World
    engine: Engine
    loader: BatchLoader
    checkpointer: Checkpointer
    schedule: Schedule
    guard: StepGuard
    metrics: Metrics
    reports: StepReports
    monitors: tuple[StepGuard | Metrics | Stragglers | Schedule, ...]
    """All that see the reports, in this order."""

    def evaluation_due(self, step: int) -> bool:
        return due(step, self.task.train.evaluate_every_steps) or step == self.schedule.num_steps

    def evaluate(self, step: int) -> bool:
        """Logs the evaluation after `step`. False if a stop signal cut it off."""
        self.world.note(f"the evaluation after step {step}")
        return self.metrics.evaluate(self.engine, step)

    def save(self, step: int) -> None:
        """Begins a checkpoint after `step`, unless it is saved already."""
        self.world.note(f"the save of step {step}")
        states = {"guard": self.guard.state(), "time_budget": self.schedule.state()}
        with self.metrics.clock_stopped():
            kept = {name: state for name, state in states.items() if state is not None}
            branch_point = self.schedule.decided_at  # another decay may branch off there
            self.metrics.checkpoint_stall_seconds += self.checkpointer.save(self.engine, step, kept, branch_point)


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


def train(run: Run, start_step: int) -> Progress:
    """Trains from `start_step` finished steps to the end of the schedule, `stop_after_step` or a stop signal.

    In all three cases it leaves a complete checkpoint of the last finished step. A stop signal cuts off an evaluation.

    Raises:
        NotFiniteError, SpikeError: on every rank, naming the step, the ranks and their places in the data order.
            Nothing that is not finite was saved.
        RecheckError: on every rank, with the ranks that compute wrongly.
        The loader's error, and OtherRankError on the other ranks: the last finished step is saved.
    """
    world, schedule, reports, config = run.world, run.schedule, run.reports, run.task.train
    step, lacks_evaluation = start_step, False
    if start_step and run.evaluation_due(start_step) and not run.metrics.is_evaluated:
        # A kill after the save cut it off, or this is a branch, whose curve begins here.
        if not run.evaluate(start_step):
            return Progress(start_step, schedule.num_steps, lacks_evaluation=True)
        run.metrics.start_up.finish("evaluation")
    run.metrics.start_clock()
    batches, failures = run.loader.steps(start_step, schedule.last_step), []
    batches = without_end(batches, start_step, config.num_micro_batches(world.size), failures)
    batches = staged(batches, world.device)
    batches = profiled(batches, start_step, config.profile_steps, run.task.config.run_dir / "profile", world)
    # `step` counts from 1. A step's rate, rows and seed follow from the number of steps finished before it.
    for step, micro_batches in enumerate(batches, start_step + 1):
        rate = schedule.rate(step - 1)
        loss = forward_backward(run, step, micro_batches, is_void=bool(failures))
        world.note(f"the norm and update of step {step}")
        norm = run.engine.step(rate)
        reports.send(step, loss, norm, rate, has_failed=bool(failures))
        if step == start_step + 1:
            world.wait_for_device()
            run.metrics.log_start_up()

        is_evaluation_due = run.evaluation_due(step)
        is_save_due = due(step, run.checkpointer.config.save_every_steps)
        is_ending = step == schedule.last_step
        must_know_now = is_save_due or is_evaluation_due or is_ending or schedule.may_decide(step)
        for report in reports.read(until_step=step if must_know_now else step - reports.lag):
            if report.failed_ranks:
                leave_without_batch(run, report, failures)
            for monitor in run.monitors:
                monitor.see(report)
        if must_know_now:
            is_save_due |= schedule.decide()
        leaving = reports.is_stop or is_ending
        if leaving:
            run.metrics.log_rest()
        if is_save_due or leaving:  # before the evaluation, which may fail or take longer than a stopped job has left
            run.save(step)
        if is_evaluation_due and not run.evaluate(step):
            run.save(step)
            leaving = lacks_evaluation = True
        if leaving:
            break
    world.note("the end of the last save")
    run.checkpointer.wait()
    return Progress(step, schedule.num_steps, lacks_evaluation)


def leave_without_batch(run: Run, report: StepReport, failures: list[Exception]) -> NoReturn:
    """Saves the step before that of this report, for which a rank had no batch. The weights are still those of then."""
    run.metrics.log_rest()
    run.save(report.step - 1)
    run.checkpointer.wait()
    if failures:
        raise failures[0]
    ranks = run.world.names_of(report.failed_ranks)
    raise OtherRankError(f"{ranks} had no batch for step {report.step}; the message there says why")


def forward_backward(run: Run, step: int, micro_batches: list[Any], is_void: bool) -> torch.Tensor:
    """Loss and gradients of each micro-batch. Returns the mean loss over this rank's rows, 0-d.

    The seed, for dropout, follows from the step and the rank, so that a resumed run draws the same. `is_void`: the
    update is to be left out, on every rank.
    """
    world, engine, every = run.world, run.engine, run.task.train.recheck_every_steps
    before = run.task.config.seed * run.schedule.num_steps + step - 1
    seed = (before * world.size + world.rank) % 2**63
    if every and due(step, every):
        world.note(f"the recheck before step {step}")
        recheck(engine, world, micro_batches[0], seed, step)
    torch.manual_seed(seed)
    world.note(f"the loss and gradients of step {step}")
    step_loss = torch.zeros((), device=world.device)
    for index, micro_batch in enumerate(micro_batches, start=1):
        loss = engine.module(micro_batch)
        step_loss += loss.detach() / len(micro_batches)
        is_last = index == len(micro_batches)
        marked = run.guard.marked(loss, step_loss, step) if is_last else loss
        marked = marked * float("nan") if is_void else marked
        engine.backward(marked / len(micro_batches), is_last)
    return step_loss
