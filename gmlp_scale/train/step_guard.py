"""What becomes of a step whose loss is not finite, or far above those before it: `train.on_not_finite` and `on_spike`.

All ranks decide alike, from the same reports. A step whose update was left out is recorded in the run folder, and a
resumed run leaves it out too.
"""

import logging
import math
import statistics
from typing import Any

import torch
from torch import Tensor

from gmlp_scale.distributed.world import World
from gmlp_scale.engine import TrainConfig
from gmlp_scale.errors import UserError
from gmlp_scale.recipe.config import Recipe
from gmlp_scale.train.sinks import MetricsFile, read_metrics
from gmlp_scale.train.step_reports import LAG_ON_GPU, StepReport

log = logging.getLogger(__name__)

NUM_RECENT, FEWEST_RECENT = 128, 32
"""How many of the last losses a new one is compared with, and with how few it is not compared at all."""
SPIKE_DEVIATIONS = 10.0
"""A spike is a loss this many standard deviations above the median of the recent ones. Deviations are taken from the
median absolute deviation, which a spike among the recent losses does not move."""
SMALLEST_DEVIATION = 0.01
"""As a share of the median: recent losses that hardly differ do not make a small rise a spike."""
MOST_IN_A_ROW = 10
"""After this many updates left out one after the other, the run stops: it is not a bad batch any more."""


class NotFiniteError(UserError):
    """A loss or gradient norm is not finite. Its update was left out, and nothing was saved since."""

    exit_code = 2


class SpikeError(UserError):
    """A loss is far above those before it, and `train.on_spike` is stop. Nothing was saved since."""

    exit_code = 2


class StepGuard:
    """Sees every step before its update and every report after it.

    Args:
        train: the `train` section of `config`, with the values of a pretraining recipe.
        state: what `state` gave for the checkpoint that the run resumes from.
    """

    def __init__(self, config: Recipe, train: TrainConfig, world: World, state: dict[str, Any] | None = None):
        self.config, self.train, self.world = config, train, world
        path = config.run_dir / "skipped_steps.jsonl"
        self.recent_losses: list[tuple[int, float]] = state["recent_losses"] if state else []
        """(step, loss) of the last steps whose updates were made."""
        recorded = world.on_main(lambda: [line["step"] for line in read_metrics(path)])
        self._recorded = set(recorded)
        self._record = MetricsFile(path) if world.is_main else None
        self._limits: dict[int, float] = {}
        self._num_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the step last seen records."""
        return {"recent_losses": self.recent_losses}

    def marked(self, loss: Tensor, step_loss: Tensor, step: int) -> Tensor:
        """The loss to differentiate in the last micro-batch of a step: NaN if its update is to be left out.

        Engines leave out an update whose gradients are not finite.

        Args:
            loss: of the last micro-batch.
            step_loss: the mean over all of this rank's rows in the step.
        """
        limit = self._limits[step] = self._limit(step)
        if step in self._recorded:
            return loss * math.nan
        if self.train.on_spike == "skip" and limit < math.inf:
            mean = self.world.sum_on_device(step_loss / self.world.size)
            return loss * torch.ones_like(mean).masked_fill(mean > limit, math.nan)
        return loss

    def see(self, report: StepReport) -> None:
        """Raises NotFiniteError or SpikeError, as the recipe asks for it, or after MOST_IN_A_ROW updates left out."""
        limit = self._limits.pop(report.step)
        # Sums over ranks may differ in the last digit from the device's own, which decided.
        is_spike = math.isfinite(report.loss) and (report.loss > limit or math.isclose(report.loss, limit))
        if report.is_finite:
            self._keep(report)
            if is_spike and self.train.on_spike == "stop":
                raise SpikeError(f"{self._spike(report, limit)}. {_BEYOND_A_SPIKE}")
            if is_spike:
                self._warn(self._spike(report, limit))
            return
        is_spike = is_spike and self.train.on_spike == "skip"
        what = self._spike(report, limit) if is_spike else self._not_finite(report)
        beyond = _BEYOND_SPIKES if is_spike else self._beyond_not_finite()
        is_recorded = report.step in self._recorded
        if self.train.on_not_finite == "stop" and not is_spike and not is_recorded:
            raise NotFiniteError(f"{what}. {beyond}")
        self._num_in_a_row += 1
        self._warn(f"{what}. Its update was left out{' as before the run stopped' if is_recorded else ''}")
        if not is_recorded:
            self._write(report, "spike" if is_spike else "not finite")
            if self._num_in_a_row >= MOST_IN_A_ROW:
                raise NotFiniteError(f"{what}. It is number {self._num_in_a_row} in a row. {beyond}")

    def _keep(self, report: StepReport) -> None:
        recent = [*self.recent_losses, (report.step, report.loss)]
        self.recent_losses = recent[-NUM_RECENT - LAG_ON_GPU :]
        self._num_in_a_row = 0

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            log.warning("%s", text)

    def close(self) -> None:
        if self._record:
            self._record.close()

    def _limit(self, step: int) -> float:
        # What a GPU's host has not read yet is left out on every device, so that a resumed run decides the same.
        # Other data have other losses.
        since = max((change for change in self.config.data_changes if change < step), default=0)
        known = [loss for at, loss in self.recent_losses if since < at < step - LAG_ON_GPU][-NUM_RECENT:]
        if len(known) < FEWEST_RECENT:
            return math.inf
        median = statistics.median(known)
        deviation = 1.4826 * statistics.median(abs(loss - median) for loss in known)  # of a normal distribution
        return median + SPIKE_DEVIATIONS * max(deviation, SMALLEST_DEVIATION * median)

    def _write(self, report: StepReport, why: str) -> None:
        if self._record:
            first, num_rows = self._positions(report.step)
            line = {"why": why, "loss": str(report.loss), "first_position": first, "rows": num_rows}
            self._record.add(report.step, line)

    def _positions(self, step: int) -> tuple[int, int]:
        """The place in the data order of the first of the step's rows, and their number."""
        batch_sizes = self.train.batch_sizes
        return batch_sizes.before(step - 1), batch_sizes.at(step - 1)

    def _spike(self, report: StepReport, limit: float) -> str:
        first, num_rows = self._positions(report.step)
        return (
            f"step {report.step}: the loss is {report.loss:.4f}, above {limit:.4f}, the limit that follows from those "
            f"before it; positions {first} to {first + num_rows - 1} of the data order"
        )

    def _not_finite(self, report: StepReport) -> str:
        first, num_rows = self._positions(report.step)
        per_rank = num_rows // self.world.size
        places = [
            f"the loss on rank {rank} (positions {first + rank * per_rank} to {first + (rank + 1) * per_rank - 1})"
            for rank, loss in enumerate(report.losses)
            if not math.isfinite(loss)
        ]
        printer = self.config.batch_printer
        shown = f" ({printer} --step {report.step - 1} shows it)" if printer else ""
        return (
            f"step {report.step}: {' and '.join(places) or 'the gradient norm, though not the loss of any rank,'} is "
            f"not finite. The batch is positions {first} to {first + num_rows - 1} of the data order{shown}"
        )

    def _beyond_not_finite(self) -> str:
        """What is left to try, of what the recipe has."""
        ways = ["Lower optimizer.peak_learning_rate", "set optimizer.gradient_clipping"]
        if self.train.precision != "float32":
            ways.append("train in float32")
        if "train.on_not_finite" in self.config.fields() and self.train.on_not_finite == "stop":
            ways.append("set train.on_not_finite=skip to go on without such updates")
        return f"The update was left out and nothing was saved since. {', '.join(ways[:-1])}, or {ways[-1]}."


_BEYOND_A_SPIKE = "Nothing was saved since. Look at the batch; train.on_spike=skip goes on without its update."
_BEYOND_SPIKES = (
    "The updates were left out and nothing was saved since. Look at the batches, lower optimizer.peak_learning_rate, "
    "or set train.on_spike=log to train on them."
)
