"""The batches of rows that lie in memory: every epoch visits all of them once, in an order of its own."""

import functools
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.hashing import permutation


class Rows(Protocol):
    """What an EpochLoader draws from."""

    num_rows: int

    def batch(self, row_indices: np.ndarray) -> Any:
        """These rows as a micro-batch for the model."""


class EpochLoader:
    """The training batches of one rank, as its plan says.

    The epochs follow one another without a gap. So every batch is full, though its last rows may belong to the next
    epoch, and every row counts the same in the loss.
    """

    def __init__(self, rows: Rows, plan: BatchPlan):
        self.rows, self.plan = rows, plan
        self.wait_seconds = 0.0
        """Time spent on making batches so far; the loop waits for it."""
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(rows.num_rows, plan.seed, epoch))

    def row_indices(self, step: int) -> np.ndarray:
        """The rows of each of this rank's micro-batches at `step`, int64 [number of them, micro_batch_size]."""
        epochs, places = np.divmod(self.plan.micro_batches(step), self.rows.num_rows)
        rows = [self._order(int(epoch))[place] for epoch, place in zip(epochs.flat, places.flat, strict=True)]
        return np.array(rows).reshape(places.shape)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[Any]]:
        """The micro-batches of each step of [start_step, stop_step)."""
        for step in range(start_step, stop_step):
            started = time.perf_counter()
            batches = [self.rows.batch(row_indices) for row_indices in self.row_indices(step)]
            self.wait_seconds += time.perf_counter() - started
            yield batches

    def close(self) -> None:
        """The rows lie in memory, so there is nothing to close."""
