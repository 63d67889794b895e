"""The order of the training rows: which row is at each position.

A position in the order counts rows from the start of training, through all epochs. In each epoch the shards are
permuted and cut into groups of `shards_per_group`, and the rows of each group are permuted among themselves. This
shuffles as well as a buffer of one group, but the state of the data is one integer, and the rows of any step are found
at once. All functions here are pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from gmlp_scale.data.hashing import permutation
from gmlp_scale.data.manifest import Shard

_SHARDS, _ROWS = 1, 2  # the first word of a permutation's key


@dataclass(frozen=True)
class RowAddresses:
    """Where some rows are stored; four int64 arrays [P]."""

    epoch: np.ndarray
    shard: np.ndarray
    """Index of the shard in the manifest."""
    row_index: np.ndarray
    """The row's number within its shard."""
    global_row_index: np.ndarray
    """The row's number in the whole split, in the manifest's order; the same in every epoch."""


def first_rows(rows_per_shard: Iterable[int]) -> np.ndarray:
    """The number in the split of each shard's first row, and last the number of rows; int64 [shards + 1]."""
    return np.cumsum([0, *rows_per_shard], dtype=np.int64)


def places_in_shards(first_rows: np.ndarray, row_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For rows by their number in the split: the index of the shard that holds each, and the row's number within it."""
    shards = np.searchsorted(first_rows, row_indices, side="right") - 1
    return shards, row_indices - first_rows[shards]


class RowOrder:
    """The order of a split whose shards hold `rows_per_shard` rows each.

    Memory: about 24 bytes per shard, and 24 bytes per row of the few groups that were used last.
    """

    def __init__(self, rows_per_shard: Sequence[int], *, shards_per_group: int, seed: int):
        assert shards_per_group >= 1
        self._rows_per_shard = np.asarray(rows_per_shard, np.int64)
        assert len(rows_per_shard) and self._rows_per_shard.min() >= 1
        self._first_rows = first_rows(rows_per_shard)
        self.num_rows = int(self._first_rows[-1])
        self.shards_per_group = shards_per_group
        self._seed = seed
        self._shuffled_shards = lru_cache(maxsize=2)(self._shuffle_shards)
        self._shuffled_group = lru_cache(maxsize=4)(self._shuffle_group)

    @classmethod
    def of_shards(cls, shards: Sequence[Shard], *, group_bytes: int, seed: int) -> Self:
        """The order of these shards' rows, in groups of about `group_bytes`."""
        shards_per_group = max(1, group_bytes * len(shards) // sum(shard.bytes for shard in shards))
        return cls([shard.rows for shard in shards], shards_per_group=shards_per_group, seed=seed)

    def locate(self, positions: np.ndarray) -> RowAddresses:
        """Addresses of the rows at `positions` in the order (non-negative integers [P], in any sequence)."""
        positions = np.asarray(positions, np.int64)
        epoch, place = np.divmod(positions, self.num_rows)
        global_row_index = np.empty_like(positions)
        for one_epoch in np.unique(epoch):
            in_epoch = np.flatnonzero(epoch == one_epoch)
            _, first_places = self._shuffled_shards(int(one_epoch))
            group = np.searchsorted(first_places, place[in_epoch], side="right") - 1
            for one_group in np.unique(group):
                chosen = in_epoch[group == one_group]
                rows = self._shuffled_group(int(one_epoch), int(one_group))
                global_row_index[chosen] = rows[place[chosen] - first_places[one_group]]
        return RowAddresses(epoch, *places_in_shards(self._first_rows, global_row_index), global_row_index)

    def shards_ahead(self, position: int, stop: int) -> list[int]:
        """The shards of the group at `position` and of the next one, unless that begins at or after `stop`."""
        epoch, place = divmod(position, self.num_rows)
        _, first_places = self._shuffled_shards(epoch)
        group = int(np.searchsorted(first_places, place, side="right")) - 1
        shards = self._members(epoch, group)
        if epoch * self.num_rows + first_places[group + 1] < stop:
            is_last = group + 2 == len(first_places)
            following = (epoch + 1, 0) if is_last else (epoch, group + 1)
            shards = np.concatenate([shards, self._members(*following)])
        return shards.tolist()

    def _shuffle_shards(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's order of the shards, and the first place in the epoch of each group (ending with num_rows)."""
        shards = permutation(len(self._rows_per_shard), _SHARDS, self._seed, epoch)
        last_shards = np.arange(self.shards_per_group, len(shards) + self.shards_per_group, self.shards_per_group)
        ends = np.cumsum(self._rows_per_shard[shards])
        return shards, np.concatenate([[0], ends[np.minimum(last_shards, len(shards)) - 1]])

    def _shuffle_group(self, epoch: int, group: int) -> np.ndarray:
        """Global indices of the rows of one group, in the order in which the epoch visits them."""
        members = self._members(epoch, group)
        rows = np.concatenate([np.arange(self._first_rows[m], self._first_rows[m + 1]) for m in members])
        return rows[permutation(len(rows), _ROWS, self._seed, epoch, group)]

    def _members(self, epoch: int, group: int) -> np.ndarray:
        """The shards of one group."""
        shards, _ = self._shuffled_shards(epoch)
        return shards[group * self.shards_per_group : (group + 1) * self.shards_per_group]
