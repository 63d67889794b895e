"""The learning rate of every step, and where the run ends."""

import math
from typing import Any

from gmlp_scale.engine import OptimizerConfig, TrainConfig
from gmlp_scale.train.step_reports import StepReport


class Schedule:
    """A pure function of the step. time_budget.py has the one that also looks at the clock."""

    def __init__(self, train: TrainConfig, optimizer: OptimizerConfig):
        self._optimizer, self._stop_after_step = optimizer, train.stop_after_step
        self.num_steps = train.num_steps
        """The last step of the run."""
        self.decided_at: int | None = None
        """The step after which the rate began to fall, where that was decided by the time."""

    @property
    def last_step(self) -> int:
        """The last step of this start."""
        return min(self._stop_after_step or self.num_steps, self.num_steps)

    def rate(self, step: int) -> float:
        """The learning rate of the update that comes after `step` finished ones."""
        return learning_rate(self._optimizer, step, self.num_steps)

    def see(self, report: StepReport) -> None:
        """Call for every report, in order."""

    def may_decide(self, step: int) -> bool:
        """Whether `decide` must be asked after this step, when its own report has been seen."""
        return False

    def decide(self) -> bool:
        """Decides the rest of the run, if it is time, from the reports up to the last step. True if it did so now."""
        return False

    def seconds_left(self, report: StepReport) -> float:
        """Until the time is over, after this step."""
        return float("inf")

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint of the step last seen records as `time_budget`."""
        return None


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of update number `step`, from 0, in a run of `num_steps`."""
    peak, num_left = config.peak_learning_rate, max(0, num_steps - step)
    is_warm = step >= config.warmup_steps
    warm_up = peak if is_warm else peak * (step + 1) / config.warmup_steps
    num_after_warmup = num_steps - config.warmup_steps
    match config.schedule:
        case "stable":  # a time budget may let the decay begin within the warm-up
            return min(warm_up, peak * (num_left / config.decay_steps if num_left < config.decay_steps else 1.0))
        case _ if not is_warm:
            return warm_up
        case "linear":
            return peak * (num_left / num_after_warmup)
        case "cosine":
            return peak * (1 - math.cos(math.pi * num_left / num_after_warmup)) / 2
