"""Lets the learning rate's decay end with `train.time_budget_seconds`, however fast the steps are.

The rate stays at its peak until as small a part of the budget is left as optimizer.decay_steps is of train.num_steps,
or until the recipe's own decay would begin and not fit. Then the speed so far tells how many steps fit into the rest of
the time, and over these the rate falls to 0. This is decided once, at a step that is saved. Every checkpoint holds the
time spent and what was decided, so from then on the run is a pure function of the step again, and resumes as such.
"""

import logging
import time
from typing import Any

from gmlp_scale.engine import OptimizerConfig, TrainConfig
from gmlp_scale.train.step_reports import StepReport

log = logging.getLogger(__name__)


def num_steps_of(details: dict[str, Any], planned: int) -> int:
    """The steps of the run whose checkpoint has these details: the decided number or, if there is none, `planned`."""
    decided = details.get("time_budget", {}).get("decided")
    return decided["num_steps"] if decided else planned


class TimeBudget:
    """Every rank has one, and all decide alike, from the same reports. Without a budget it does nothing.

    Args:
        config, optimizer: of the recipe. The attributes of these names have the decided steps, once there are any.
        began: when this start of the run began, in seconds of time.perf_counter().
        recorded: the `time_budget` of the checkpoint that the run resumes from.
    """

    def __init__(
        self, config: TrainConfig, optimizer: OptimizerConfig, *, began: float, recorded: dict[str, Any] | None
    ):
        self.config, self.optimizer = config, optimizer
        recorded = recorded if config.time_budget_seconds else None
        self._decay_share = optimizer.decay_steps / config.num_steps
        self._decided = recorded and recorded["decided"]
        self._began = began - (recorded["spent_seconds"] if recorded else 0.0)
        self._timed: tuple[int, float] = recorded["timed"] if recorded else (0, 0.0)
        """Rows, and the seconds that they took, of the starts before this one."""
        self._first: StepReport | None = None
        """The first report of this start. Its step is not counted in the speed, since it also compiles."""
        self._last: StepReport | None = None
        self._apply()

    def spent_seconds(self) -> float:
        """By now, over all starts of the run: what they lost by being killed is not counted."""
        return time.perf_counter() - self._began

    def see(self, report: StepReport) -> None:
        """Call for every report, in order."""
        self._first, self._last = self._first or report, report

    @property
    def decided_at(self) -> int | None:
        """The step after which the rate began to fall, where that was decided by the time."""
        return self._decided["at_step"] if self._decided else None

    @property
    def is_decay_due(self) -> bool:
        """Whether the time has come to decide, which has not been done yet."""
        budget = self.config.time_budget_seconds
        if budget is None or self._decided or self._last is None or not self._timed_so_far()[0]:
            return False
        if self._last.step < self._planned_start:
            return self._last.spent_seconds >= budget * (1 - self._decay_share)
        return self._last.step == self._planned_start and self._num_fitting() < self.config.num_steps

    def must_know(self, step: int) -> bool:
        """Whether is_decay_due has to be asked after this step's own report, as the decay of the recipe begins."""
        return self.config.time_budget_seconds is not None and step == self._planned_start

    def decide(self) -> tuple[TrainConfig, OptimizerConfig]:
        """Decides the rest of the run from the reports, which must all have been seen."""
        last, batch_sizes = self._last, self.config.batch_sizes
        num_steps = min(max(self._num_fitting(), last.step + 1), self.config.num_steps)
        self._decided = {"at_step": last.step, "num_steps": num_steps, "decay_steps": num_steps - last.step}
        log.info(
            "after %.0f of %.0f s at step %d: the rate falls from here on, and the run ends at step %d",
            last.spent_seconds, self.config.time_budget_seconds, last.step, num_steps,
        )  # fmt: skip
        if last.step < self.optimizer.warmup_steps:
            log.warning("that is within the warm-up of %d steps: the budget is short", self.optimizer.warmup_steps)
        if batch_sizes.starts[-1] >= num_steps:
            log.warning("train.global_batch_size changes at step %d, which never comes", batch_sizes.starts[-1])
        self._apply()
        return self.config, self.optimizer

    def record(self) -> dict[str, Any]:
        """What a checkpoint of the step last seen adds to its details; nothing without a budget."""
        if self.config.time_budget_seconds is None:
            return {}
        spent_seconds, timed = self._last.spent_seconds, self._timed_so_far()
        return {"time_budget": {"spent_seconds": spent_seconds, "timed": timed, "decided": self._decided}}

    @property
    def _planned_start(self) -> int:
        """The step after which the recipe's own decay begins."""
        return self.config.num_steps - self.optimizer.decay_steps

    def _num_fitting(self) -> int:
        """How many steps of the run the budget is enough for, by the speed so far."""
        batch_sizes, (timed_rows, timed_seconds) = self.config.batch_sizes, self._timed_so_far()
        seconds_left = max(0.0, self.config.time_budget_seconds - self._last.spent_seconds)
        return batch_sizes.steps_within(batch_sizes.before(self._last.step) + seconds_left / timed_seconds * timed_rows)

    def _timed_so_far(self) -> tuple[int, float]:
        """Rows, and the seconds that they took with evaluations and saves, over all starts."""
        (num_rows, seconds), batch_sizes = self._timed, self.config.batch_sizes
        num_rows += batch_sizes.before(self._last.step) - batch_sizes.before(self._first.step)
        return num_rows, seconds + self._last.spent_seconds - self._first.spent_seconds

    def _apply(self) -> None:
        if self._decided:
            num_steps, decay_steps = self._decided["num_steps"], self._decided["decay_steps"]
            self.config = self.config.model_copy(update={"num_steps": num_steps})
            self.optimizer = self.optimizer.model_copy(update={"decay_steps": decay_steps})
