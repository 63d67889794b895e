"""The order of finetuning's rows, and predictions for all rows of a part over the ranks."""

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.data.hashing import permutation
from gmlp_scale.models.heads import LabelledBatch, SpanBatch
from gmlp_scale.tasks.classification import ClassificationRows
from gmlp_scale.tasks.question_answering import QuestionRows
from gmlp_scale.world import World

Rows = ClassificationRows | QuestionRows
Batch = LabelledBatch | SpanBatch


class EpochLoader:
    """The training batches of one rank, each a pure function of the step, as in pretraining.

    Positions run on over the epochs and each epoch visits the rows in a permutation of its own; step t takes positions
    [t*B, (t+1)*B) and this rank its consecutive slice. So every batch is full, its last rows perhaps of the next
    epoch, and no row counts more than another in any loss.
    """

    def __init__(
        self, rows: Rows, *, seed: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
    ):
        assert global_batch_size % (world_size * micro_batch_size) == 0
        self.rows = rows
        self.wait_seconds = 0.0
        """Time spent on making batches so far; the loop waits for it."""
        self._global_batch_size, self._micro_batch_size = global_batch_size, micro_batch_size
        self._rank, self._world_size = rank, world_size
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(rows.num_rows, seed, epoch))

    def row_numbers(self, step: int) -> np.ndarray:
        """The rows that this rank takes at `step`, in order."""
        num_own = self._global_batch_size // self._world_size
        first = step * self._global_batch_size + self._rank * num_own
        epochs, places = np.divmod(np.arange(first, first + num_own), self.rows.num_rows)
        return np.array([self._order(int(epoch))[place] for epoch, place in zip(epochs, places, strict=True)])

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step of [start_step, stop_step)."""
        for step in range(start_step, stop_step):
            started = time.perf_counter()
            numbers = self.row_numbers(step)
            starts = range(0, len(numbers), self._micro_batch_size)
            batches = [self.rows.batch(numbers[start : start + self._micro_batch_size]) for start in starts]
            self.wait_seconds += time.perf_counter() - started
            yield batches


def summarize_all(rows: Rows, predict: Callable[[Batch], Tensor], world: World, batch_size: int) -> np.ndarray:
    """What scoring needs of every row's logits, float32 [num_rows, summary_size], on every rank.

    The ranks take batches in turn, each as many, since predicting may need all of them; what fills up the last ones
    is left out.
    """
    summaries = np.zeros((rows.num_rows, rows.summary_size))
    for start in range(0, rows.num_rows, batch_size * world.size):
        numbers = np.arange(batch_size) + start + world.rank * batch_size
        batch = rows.batch(np.minimum(numbers, rows.num_rows - 1))
        with torch.no_grad():
            result = rows.summarize(predict(batch.to(world.device))).cpu().numpy()
        is_row = numbers < rows.num_rows
        summaries[numbers[is_row]] = result[is_row]
    if world.size > 1:
        summaries = np.array(world.sum(summaries.ravel().tolist())).reshape(summaries.shape)
    return summaries.astype(np.float32)
