"""Which rows each step of a rank takes, in which micro-batches; and the batches of rows that lie in memory."""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmlp_scale.data.hashing import permutation
from gmlp_scale.errors import InputError
from gmlp_scale.piecewise import Piecewise

STEPS_PER_POOL = 50
"""So many steps' rows are sorted by length at a time. With more, what is in a step would hang more on the length."""


@dataclass(frozen=True)
class BatchPlan:
    """How the rows of a run are cut into batches; the same for text, images and finetuning.

    Step t, counted from 0, takes the positions of the training order that follow those of all steps before it. Each
    rank takes its consecutive slice of them. So every batch is a pure function of the step, and the batch of all ranks
    together is the same on any number of them.

    Raises InputError unless the ranks' micro-batches divide every batch.
    """

    seed: int
    """The run's. It decides the order of the rows, their masks and what is done to images."""
    batch_sizes: Piecewise
    """Rows of each step over all ranks."""
    micro_batch_size: int
    """Rows per forward pass on one rank."""
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        if any(rows % (self.world_size * self.micro_batch_size) for rows in self.batch_sizes.values):
            raise InputError(
                f"train.global_batch_size={self.batch_sizes.shown()} does not divide by world size {self.world_size} x "
                f"train.micro_batch_size={self.micro_batch_size}: change one of the three"
            )

    def positions(self, step: int) -> range:
        """The positions in the training order whose rows this rank takes at `step`."""
        num_own = self.batch_sizes.at(step) // self.world_size
        first = self.batch_sizes.before(step) + self.rank * num_own
        return range(first, first + num_own)

    def micro_batches(self, step: int) -> np.ndarray:
        """`positions(step)` by micro-batch, int64 [number of them, micro_batch_size]."""
        return np.array(self.positions(step)).reshape(-1, self.micro_batch_size)

    def heldout(self, num_rows: int) -> list[np.ndarray]:
        """The held-out rows of each of this rank's micro-batches, by their numbers, for the first `num_rows` rows.

        Every rank has the same number of micro-batches. Numbers from `num_rows` on only fill up the last ones.
        """
        size, first = self.micro_batch_size, self.rank * self.micro_batch_size
        return [np.arange(start, start + size) for start in range(first, num_rows + first, size * self.world_size)]


class EpochLoader:
    """The training batches of one rank, as its plan says.

    The epochs follow one another without a gap. So every batch is full, though its last rows may belong to the next
    epoch, and every row counts the same in the loss.

    rows: have `num_rows` and `batch(row_indices)`, which gives these rows as a micro-batch for the model.
    lengths_R: if given, the rows of a step have about the same length.
    cuts_padding: a micro-batch is as long as its longest row, for a model that masks padding.
    """

    def __init__(self, rows: Any, plan: BatchPlan, lengths_R: np.ndarray | None = None, *, cuts_padding: bool = False):
        self.rows, self.plan, self.cuts_padding = rows, plan, cuts_padding
        self.wait_seconds = 0.0
        """Time spent on making batches so far; the loop waits for it."""
        self._lengths_R = lengths_R
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

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
            batches = [batch.cut_padding() for batch in batches] if self.cuts_padding else batches
            self.wait_seconds += time.perf_counter() - started
            yield batches

    def _shuffle(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in their order, which the seed and the epoch decide."""
        num_rows, seed = self.rows.num_rows, self.plan.seed
        order_R = permutation(num_rows, seed, epoch)
        if self._lengths_R is None:
            return order_R
        size = self.plan.batch_sizes.last
        pools_R = np.arange(num_rows) // (size * STEPS_PER_POOL)
        order_R = order_R[np.lexsort((self._lengths_R[order_R], pools_R))]
        # The last step of the epoch before takes this one's first rows. Between these and its own last ones are whole
        # steps, which are shuffled.
        steps = np.split(order_R, range(-epoch * num_rows % size, num_rows, size))
        steps[1:-1] = [steps[1 + number] for number in permutation(len(steps[1:-1]), seed, epoch, 1)]
        return np.concatenate(steps)

    def close(self) -> None:
        """The rows lie in memory, so there is nothing to close."""
