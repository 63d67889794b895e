"""What scoring needs of a model's predictions for every row of a part, gathered over the ranks."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gmlp_scale.models.heads import LabelledBatch, SpanBatch
from gmlp_scale.tasks.table import TaskRows
from gmlp_scale.world import World


def summarize_all(
    rows: TaskRows, predict: Callable[[LabelledBatch | SpanBatch], Tensor], world: World, batch_size: int
) -> np.ndarray:
    """What scoring needs of every row's logits, float32 [num_rows, summary_size], on every rank.

    The ranks take batches in turn. Every rank takes the same number of batches, since an engine may need all ranks to
    predict; the rows that fill up the last batches are left out.
    """
    summaries = np.zeros((rows.num_rows, rows.summary_size))
    for start in range(0, rows.num_rows, batch_size * world.size):
        row_indices = np.arange(batch_size) + start + world.rank * batch_size
        batch = rows.batch(np.minimum(row_indices, rows.num_rows - 1))
        with torch.no_grad():
            result = rows.summarize(predict(batch.to(world.device))).cpu().numpy()
        is_row = row_indices < rows.num_rows
        summaries[row_indices[is_row]] = result[is_row]
    if world.size > 1:
        summaries = np.array(world.sum(summaries.ravel().tolist())).reshape(summaries.shape)
    return summaries.astype(np.float32)
