"""Names the ranks that are slower than the others. All ranks wait for each other, so a step takes all equally long.

So each rank times what no other one holds up: its waits for batches, and the end of a forward pass, from the final
LayerNorm to the loss. By then every engine has gathered the parameters. (ZeRO 3 may still gather the head's, which
hides some of a difference.) It is a small part of a step, but a slow device, memory or host shows there too. No device
is waited for: a GPU's events are read once they have come to pass.
"""

import logging
import statistics
import time
from collections.abc import Sequence

import torch
from torch import nn

from gmlp_scale.distributed.world import World
from gmlp_scale.tasks.task import BatchLoader
from gmlp_scale.train.step_reports import StepReport

log = logging.getLogger(__name__)

SLOW_FACTOR = 1.5
"""A rank is slow in a step for which it alone would need more than this many times the median of all ranks."""
NUM_SLOW_STEPS = 100
"""After this many slow steps in a row a rank is named."""


class Stragglers:
    """Every rank has one; rank 0's names the slow ones, each once until it is fast again."""

    def __init__(self, world: World, module: nn.Module, loader: BatchLoader):
        self.world, self.loader = world, loader
        self._head = HeadClock(module, world.device)
        self._wait_seconds, self._ended_at = loader.wait_seconds, time.perf_counter()
        self._step_seconds = [0.0, 0.0]
        """Of the last two steps. One may have an evaluation or a save before it, so the shorter counts."""
        self._num_slow = [0] * world.size

    def own_seconds(self) -> tuple[float, float]:
        """Call once a step. How long this rank computed by itself, and how long it waited for the step's batches."""
        now, waited = time.perf_counter(), self.loader.wait_seconds
        own = (self._head.seconds(), waited - self._wait_seconds)
        self._step_seconds = [self._step_seconds[1], now - self._ended_at]
        self._wait_seconds, self._ended_at = waited, now
        return own

    def see(self, report: StepReport) -> None:
        """Call for every report in order."""
        if self.world.size == 1 or not self.world.is_main:
            return
        own = alone(report.compute_seconds, report.wait_seconds, min(self._step_seconds))
        median = statistics.median_low(own)
        for rank, seconds in enumerate(own):
            self._num_slow[rank] = self._num_slow[rank] + 1 if seconds > SLOW_FACTOR * median else 0
            if self._num_slow[rank] == NUM_SLOW_STEPS:
                log.warning(
                    "%s holds the others up: for %d steps in a row it alone would have needed over %.1f "
                    "times as long as the median rank; at step %d %.1f times, with %.3f s of waits for its batches. "
                    "Look at the clocks, the other processes and the disk of that host",
                    self.world.name_of(rank), NUM_SLOW_STEPS, SLOW_FACTOR, report.step, seconds / median,
                    report.wait_seconds[rank],
                )  # fmt: skip


def alone(compute_seconds: Sequence[float], wait_seconds: Sequence[float], step_seconds: float) -> list[float]:
    """How long each rank alone would need for a step that took all of them `step_seconds`.

    compute_seconds: of the same part of the step on each rank. The rest of the step is taken to be as many times longer
    or shorter than the slowest rank's; what the slowest loader waited for comes on top of it.
    """
    if not max(compute_seconds):
        return [0.0] * len(compute_seconds)  # no GPU's events were read yet
    scale = max(0.0, step_seconds - max(wait_seconds)) / max(compute_seconds)
    return [wait + scale * compute for compute, wait in zip(compute_seconds, wait_seconds, strict=True)]


class HeadClock:
    """Times forward passes of a model, or of an engine's module around it, from the final LayerNorm to the loss."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._is_on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._began: float | torch.cuda.Event | None = None
        self._ended: float | torch.cuda.Event | None = None
        module.norm.register_forward_pre_hook(lambda *_: self._begin())
        module.register_forward_hook(lambda *_: self._end())

    def seconds(self) -> float:
        """How long the newest pass took that is known to have ended; 0 before the first."""
        if self._ended is not None and self._has_ended():
            if self._is_on_gpu:
                self._seconds = self._began.elapsed_time(self._ended) / 1000
            else:
                self._seconds = self._ended - self._began
            self._began = self._ended = None
        return self._seconds

    def _has_ended(self) -> bool:
        return not self._is_on_gpu or self._ended.query()

    def _begin(self) -> None:
        if self._ended is None:  # else the pass before is still to be read
            self._began = self._now()

    def _end(self) -> None:
        if self._ended is None:
            self._ended = self._now()

    def _now(self) -> "float | torch.cuda.Event":
        if not self._is_on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
