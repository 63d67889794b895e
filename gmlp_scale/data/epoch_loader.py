"""The order of finetuning's rows: every epoch visits all rows once, in an order of its own."""

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from gmlp_scale.data.hashing import permutation
from gmlp_scale.data.order import positions_of_rank
from gmlp_scale.piecewise import Piecewise


class Rows(Protocol):
    """What an EpochLoader draws from."""

    num_rows: int

    def batch(self, row_indices: np.ndarray) -> Any:
        """These rows as a micro-batch for the model."""


class EpochLoader:
    """The training batches of one rank, each a pure function of the step, as in pretraining.

    The epochs follow one another without a gap. Each step takes the next rows, and each rank its consecutive slice of
    them (`positions_of_rank`). So every batch is full, though its last rows may belong to the next epoch, and every row
    counts the same in the loss.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch_size: int | Sequence[tuple[int, int]],
        micro_batch_size: int,
        rank: int,
        world_size: int,
    ):
        self._batch_sizes = Piecewise(global_batch_size)
        assert not any(batch_size % (world_size * micro_batch_size) for batch_size in self._batch_sizes.values)
        self.rows = rows
        self.wait_seconds = 0.0
        """Time spent on making batches so far; the loop waits for it."""
        self._micro_batch_size = micro_batch_size
        self._rank, self._world_size = rank, world_size
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(rows.num_rows, seed, epoch))

    def row_indices(self, step: int) -> np.ndarray:
        """The rows that this rank takes at `step`, in order."""
        positions = positions_of_rank(self._batch_sizes, step, self._rank, self._world_size)
        epochs, places = np.divmod(positions, self.rows.num_rows)
        return np.array([self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[Any]]:
        """The micro-batches of each step of [start_step, stop_step)."""
        for step in range(start_step, stop_step):
            started = time.perf_counter()
            row_indices = self.row_indices(step)
            starts = range(0, len(row_indices), self._micro_batch_size)
            batches = [self.rows.batch(row_indices[start : start + self._micro_batch_size]) for start in starts]
            self.wait_seconds += time.perf_counter() - started
            yield batches

    def close(self) -> None:
        """The rows lie in memory, so there is nothing to close."""
