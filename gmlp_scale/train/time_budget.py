"""The schedule of a run with `train.time_budget_seconds`: the decay ends with the time, however fast the steps are.

The rate stays at its peak until as small a part of the budget is left as optimizer.decay_steps is of train.num_steps,
or until the recipe's own decay would begin and not fit. Then the speed so far says how many steps fit into the rest of
the time, and over these the rate falls to 0. This is decided once, at a step that is saved. Every checkpoint holds the
time spent and what was decided, so from then on the run is a pure function of the step again.
"""

import logging
from typing import Any

from gmlp_scale.engine import OptimizerConfig, TrainConfig
from gmlp_scale.train.schedule import Schedule
from gmlp_scale.train.step_reports import StepReport

log = logging.getLogger(__name__)


def num_steps_of(details: dict[str, Any], planned: int) -> int:
    """The steps of the run whose checkpoint has these details: the decided number or, if there is none, `planned`."""
    decided = details.get("time_budget", {}).get("decided")
    return decided["num_steps"] if decided else planned


def build_schedule(train: TrainConfig, optimizer: OptimizerConfig, details: dict[str, Any]) -> Schedule:
    """The schedule of a recipe. details: those of the checkpoint that the run resumes from; empty for a new run."""
    if train.time_budget_seconds is None:
        return Schedule(train, optimizer)
    return TimedSchedule(train, optimizer, details.get("time_budget"))


class TimedSchedule(Schedule):
    """Every rank has one, and all decide alike, from the same reports.

    recorded: the `state` in the checkpoint that the run resumes from.
    """

    def __init__(self, train: TrainConfig, optimizer: OptimizerConfig, recorded: dict[str, Any] | None = None):
        super().__init__(train, optimizer)
        self._budget_seconds, self._batch_sizes = train.time_budget_seconds, train.batch_sizes
        self._planned_steps, self._planned_start = train.num_steps, train.num_steps - optimizer.decay_steps
        """The recipe's last step, and the step after which its own decay begins."""
        self._decided: dict[str, int] | None = None
        self._spent_before, self._timed = 0.0, (0, 0.0)
        """Of the starts before this one: the seconds spent, without what they lost by being killed; and the rows whose
        speed was measured, with the seconds that they took."""
        if recorded:
            self._spent_before, self._timed = recorded["spent_seconds"], recorded["timed"]
            self._apply(recorded["decided"])
        self._first: StepReport | None = None
        """The first report of this start. Its step is not counted in the speed, since it also compiles."""
        self._last: StepReport | None = None

    def see(self, report: StepReport) -> None:
        self._first, self._last = self._first or report, report

    def may_decide(self, step: int) -> bool:
        return self._is_decay_due or (self._decided is None and step == self._planned_start)

    def decide(self) -> bool:
        if not self._is_decay_due:
            return False
        last = self._last
        num_steps = min(max(self._num_fitting(), last.step + 1), self._planned_steps)
        log.info(
            "after %.0f of %.0f s at step %d: the rate falls from here on, and the run ends at step %d",
            self._spent(last), self._budget_seconds, last.step, num_steps,
        )  # fmt: skip
        if last.step < self._optimizer.warmup_steps:
            log.warning("that is within the warm-up of %d steps: the budget is short", self._optimizer.warmup_steps)
        if self._batch_sizes.starts[-1] >= num_steps:
            log.warning("train.global_batch_size changes at step %d, which never comes", self._batch_sizes.starts[-1])
        self._apply({"at_step": last.step, "num_steps": num_steps, "decay_steps": num_steps - last.step})
        return True

    def seconds_left(self, report: StepReport) -> float:
        return max(0.0, self._budget_seconds - self._spent(report))

    def state(self) -> dict[str, Any]:
        spent_seconds = self._spent(self._last)
        return {"spent_seconds": spent_seconds, "timed": self._timed_so_far(), "decided": self._decided}

    def _apply(self, decided: dict[str, int] | None) -> None:
        self._decided = decided
        if decided:
            self.num_steps, self.decided_at = decided["num_steps"], decided["at_step"]
            self._optimizer = self._optimizer.model_copy(update={"decay_steps": decided["decay_steps"]})

    @property
    def _is_decay_due(self) -> bool:
        if self._decided or self._last is None or not self._timed_so_far()[0]:
            return False
        if self._last.step < self._planned_start:
            return self._spent(self._last) >= self._budget_seconds * self._planned_start / self._planned_steps
        return self._last.step == self._planned_start and self._num_fitting() < self._planned_steps

    def _spent(self, report: StepReport) -> float:
        """Seconds over all starts of the run, when this step was done."""
        return self._spent_before + report.spent_seconds

    def _num_fitting(self) -> int:
        """How many steps of the run the budget is enough for, by the speed so far."""
        timed_rows, timed_seconds = self._timed_so_far()
        num_rows = self.seconds_left(self._last) / timed_seconds * timed_rows
        return self._batch_sizes.steps_within(self._batch_sizes.before(self._last.step) + num_rows)

    def _timed_so_far(self) -> tuple[int, float]:
        """Rows, and the seconds that they took with evaluations and saves, over all starts."""
        num_rows, seconds = self._timed
        num_rows += self._batch_sizes.before(self._last.step) - self._batch_sizes.before(self._first.step)
        return num_rows, seconds + self._last.spent_seconds - self._first.spent_seconds
