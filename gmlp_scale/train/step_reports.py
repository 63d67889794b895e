"""What all ranks learn of a step together: its mean loss and gradient norm, whether to stop, and who was how fast.

With NCCL the hosts do not meet at a step: one may be steps ahead of another. So what all ranks must decide alike is
summed over the devices, within each step, and every host reads it at the same later point of its own program.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gmlp_scale.distributed.world import World

LAG_ON_GPU = 1
"""How many steps later a host reads a report. The GPU then has a whole step queued while its host waits for the report
of the step before."""


@dataclass(frozen=True)
class StepReport:
    """The same on every rank. Its tuples have a value for each rank."""

    step: int
    loss: float
    """Mean over the global batch."""
    norm: float
    learning_rate: float
    losses: tuple[float, ...] = ()
    """Mean over each rank's rows."""
    compute_seconds: tuple[float, ...] = ()
    """How long each rank computed without waiting for another (train/stragglers.py)."""
    wait_seconds: tuple[float, ...] = ()
    """How long each rank waited for the step's batches."""
    failed_ranks: tuple[int, ...] = ()
    """Those that had no batch for the step. Its update was left out on every rank."""
    spent_seconds: float = 0.0
    """Since the start of the run began, by rank 0's clock when it had sent the step."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class StepReports:
    """All ranks send each step's report and read them in order; between a step's sending and reading no host waits.

    Args:
        own_seconds: called once a step; gives this rank's compute_seconds and wait_seconds.
        began: when this start of the run began, in seconds of time.perf_counter().
    """

    def __init__(self, world: World, own_seconds: Callable[[], tuple[float, float]], began: float):
        self.world, self._own_seconds, self._began = world, own_seconds, began
        self.lag = LAG_ON_GPU if world.device.type == "cuda" else 0
        self.is_stop = False
        """Whether a report that was read says that a rank has received a stop signal."""
        self._sent: deque[tuple[int, float, Tensor, torch.cuda.Event | None]] = deque()

    def send(self, step: int, loss: Tensor, norm: Tensor, learning_rate: float, has_failed: bool = False) -> None:
        """loss: the mean over this rank's rows; norm: the global one. Both 0-d, on the device."""
        # torch.tensor would copy the flag and the seconds to the device and wait for that.
        is_stop = torch.full_like(loss, self.world.is_stop_signalled, dtype=torch.float64)
        spent = torch.full_like(is_stop, self.spent_seconds() if self.world.is_main else 0.0)
        by_rank = loss.new_zeros(4, self.world.size, dtype=torch.float64)
        by_rank[0, self.world.rank].copy_(loss)
        for kind, value in enumerate((*self._own_seconds(), has_failed), start=1):
            by_rank[kind, self.world.rank].fill_(value)
        summed = torch.cat([torch.stack([loss.double() / self.world.size, is_stop, spent]), by_rank.flatten()])
        on_device = torch.cat([self.world.sum_on_device(summed), norm.double()[None]])
        if on_device.device.type == "cpu":
            self._sent.append((step, learning_rate, on_device, None))
            return
        on_host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
        on_host.copy_(on_device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._sent.append((step, learning_rate, on_host, copied))

    def spent_seconds(self) -> float:
        return time.perf_counter() - self._began

    def read(self, until_step: int) -> Iterator[StepReport]:
        """The reports not yet read up to that of `until_step`; after one that says to stop, all that were sent."""
        while self._sent and (self._sent[0][0] <= until_step or self.is_stop):
            step, learning_rate, values, copied = self._sent.popleft()
            if copied:
                self.world.wait_until(copied.query)
            loss, num_signalled, spent, *by_rank, norm = values.numpy().tolist()
            self.is_stop |= num_signalled > 0
            size = self.world.size
            *kinds, failed = (tuple(by_rank[kind * size :][:size]) for kind in range(4))
            failed_ranks = tuple(rank for rank, has_failed in enumerate(failed) if has_failed)
            yield StepReport(step, loss, norm, learning_rate, *kinds, failed_ranks, spent)
