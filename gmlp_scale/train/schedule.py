"""The learning rate of every step, and where the run ends. With a time budget the clock has a say too.

The rate then stays at its peak until as small a part of the budget is left as optimizer.decay_steps is of
train.num_steps, or until the recipe's own decay would begin and not fit. Then the speed so far says how many steps fit
into the rest of the time, and over these the rate falls to 0. This is decided once, at a step that is saved. Every
checkpoint holds the time spent and what was decided, so from then on the run is a pure function of the step again.
"""

import logging
from typing import Any

from gmlp_scale.engine import OptimizerConfig, TrainConfig
from gmlp_scale.engine.optimizer import learning_rate
from gmlp_scale.train.step_reports import StepReport

log = logging.getLogger(__name__)


def num_steps_of(details: dict[str, Any], planned: int) -> int:
    """The steps of the run whose checkpoint has these details: the decided number or, if there is none, `planned`."""
    decided = (details.get("time_budget") or {}).get("decided")
    return decided["num_steps"] if decided else planned


class Schedule:
    """Every rank has one, and all decide alike, from the same reports.

    recorded: the `time_budget` of the checkpoint that the run resumes from.
    """

    def __init__(self, train: TrainConfig, optimizer: OptimizerConfig, recorded: dict[str, Any] | None = None):
        self._train, self._optimizer = train, optimizer
        self._budget_seconds = train.time_budget_seconds
        recorded = recorded if self._budget_seconds else None
        self._decided: dict[str, int] | None = recorded and recorded["decided"]
        self._spent_before: float = recorded["spent_seconds"] if recorded else 0.0
        """By the starts of the run before this one. What they lost by being killed is not counted."""
        self._timed: tuple[int, float] = recorded["timed"] if recorded else (0, 0.0)
        """Rows, and the seconds that they took, of the starts before this one."""
        self._first: StepReport | None = None
        """The first report of this start. Its step is not counted in the speed, since it also compiles."""
        self._last: StepReport | None = None

    @property
    def num_steps(self) -> int:
        """The last step of the run."""
        return self._decided["num_steps"] if self._decided else self._train.num_steps

    @property
    def last_step(self) -> int:
        """The last step of this start."""
        return min(self._train.stop_after_step or self.num_steps, self.num_steps)

    @property
    def decided_at(self) -> int | None:
        """The step after which the rate began to fall, where that was decided by the time."""
        return self._decided["at_step"] if self._decided else None

    def rate(self, step: int) -> float:
        """The learning rate of the update that comes after `step` finished ones."""
        optimizer = self._optimizer
        if self._decided:
            optimizer = optimizer.model_copy(update={"decay_steps": self._decided["decay_steps"]})
        return learning_rate(optimizer, step, self.num_steps)

    def see(self, report: StepReport) -> None:
        """Call for every report, in order."""
        self._first, self._last = self._first or report, report

    def seconds_left(self, report: StepReport) -> float:
        """Of the budget, after this step; infinite without one."""
        return float("inf") if self._budget_seconds is None else max(0.0, self._budget_seconds - self._spent(report))

    def may_decide(self, step: int) -> bool:
        """Whether `decide` must be asked after this step, when its own report has been seen."""
        return self._is_decay_due or (self._budget_seconds is not None and step == self._planned_start)

    def decide(self) -> bool:
        """Decides the rest of the run, if it is time, from the reports up to the last step. True if it did so now."""
        if not self._is_decay_due:
            return False
        last, batch_sizes = self._last, self._train.batch_sizes
        num_steps = min(max(self._num_fitting(), last.step + 1), self._train.num_steps)
        self._decided = {"at_step": last.step, "num_steps": num_steps, "decay_steps": num_steps - last.step}
        log.info(
            "after %.0f of %.0f s at step %d: the rate falls from here on, and the run ends at step %d",
            self._spent(last), self._budget_seconds, last.step, num_steps,
        )  # fmt: skip
        if last.step < self._optimizer.warmup_steps:
            log.warning("that is within the warm-up of %d steps: the budget is short", self._optimizer.warmup_steps)
        if batch_sizes.starts[-1] >= num_steps:
            log.warning("train.global_batch_size changes at step %d, which never comes", batch_sizes.starts[-1])
        return True

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint of the step last seen records as `time_budget`; None without a budget."""
        if self._budget_seconds is None:
            return None
        return {
            "spent_seconds": self._spent(self._last),
            "timed": self._timed_so_far(),
            "decided": self._decided,
        }

    @property
    def _is_decay_due(self) -> bool:
        if self._budget_seconds is None or self._decided or self._last is None or not self._timed_so_far()[0]:
            return False
        if self._last.step < self._planned_start:
            decay_share = self._optimizer.decay_steps / self._train.num_steps
            return self._spent(self._last) >= self._budget_seconds * (1 - decay_share)
        return self._last.step == self._planned_start and self._num_fitting() < self._train.num_steps

    @property
    def _planned_start(self) -> int:
        """The step after which the recipe's own decay begins."""
        return self.num_steps - (self._decided or {"decay_steps": self._optimizer.decay_steps})["decay_steps"]

    def _spent(self, report: StepReport) -> float:
        """Seconds over all starts of the run, when this step was done."""
        return self._spent_before + report.spent_seconds

    def _num_fitting(self) -> int:
        """How many steps of the run the budget is enough for, by the speed so far."""
        batch_sizes, (timed_rows, timed_seconds) = self._train.batch_sizes, self._timed_so_far()
        num_rows = self.seconds_left(self._last) / timed_seconds * timed_rows
        return batch_sizes.steps_within(batch_sizes.before(self._last.step) + num_rows)

    def _timed_so_far(self) -> tuple[int, float]:
        """Rows, and the seconds that they took with evaluations and saves, over all starts."""
        (num_rows, seconds), batch_sizes = self._timed, self._train.batch_sizes
        num_rows += batch_sizes.before(self._last.step) - batch_sizes.before(self._first.step)
        return num_rows, seconds + self._last.spent_seconds - self._first.spent_seconds
