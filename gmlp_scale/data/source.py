"""The rows of one source: one folder of shards, its order, its epochs and its masks."""

import numpy as np

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.manifest import CorruptShardError
from gmlp_scale.data.mixture import SourceConfig, source_seed
from gmlp_scale.data.open_shards import OpenShards, SkipCorruptShards
from gmlp_scale.data.order import RowAddresses, RowOrder, places_in_shards
from gmlp_scale.data.shards import Manifest

_HELDOUT_SEED = 0


class Source:
    """The rows of one folder of shards.

    Args:
        place: the source's place in the recipe's list, by which each source draws otherwise; 0 for a single source.
        seed: the run's.
    """

    def __init__(
        self,
        config: SourceConfig,
        manifest: Manifest,
        files: ShardFiles,
        *,
        place: int,
        seed: int,
        shuffle_group_bytes: int,
        skip_corrupt: SkipCorruptShards | None,
    ):
        self.config = config
        self.manifest = manifest
        self.num_rows = manifest.num_rows("train")
        self.seed = source_seed(seed, place)
        """Decides the order and the masks of its training rows."""
        self.heldout_seed = source_seed(_HELDOUT_SEED, place)
        self._files = files
        shards = manifest.splits.train
        self._order = RowOrder.of_shards(shards, group_bytes=shuffle_group_bytes, seed=self.seed)
        num_open = 2 * self._order.shards_per_group + 8
        self._shards = OpenShards(files, shards, manifest.sequence_length, num_open=num_open, skip_corrupt=skip_corrupt)

    def locate(self, positions: np.ndarray) -> RowAddresses:
        """Addresses of its training rows at these positions, which count its own rows through all its epochs."""
        return self._order.locate(positions)

    def read(self, shards: np.ndarray, row_indices: np.ndarray) -> np.ndarray:
        """Training rows, uint16 [P, N], by their numbers within their shards. CorruptShardError as OpenShards.read."""
        try:
            return self._shards.read(shards, row_indices)
        except CorruptShardError as error:
            skip = ", or set data.on_corrupt_shard=skip and data.max_corrupt_shards"
            raise CorruptShardError(error.name, error.found, skip) from error

    def open_ahead(self, position: int, stop: int) -> None:
        """Starts to open the shards of the group at `position` and of the next one, unless that begins at `stop`."""
        self._shards.open_ahead(self._order.shards_ahead(position, stop))

    def locate_heldout(self, row_indices: np.ndarray) -> RowAddresses:
        """Addresses of its held-out rows with these numbers in the split."""
        first_rows = np.cumsum([0, *(shard.rows for shard in self.manifest.splits.heldout)])
        return RowAddresses(np.zeros_like(row_indices), *places_in_shards(first_rows, row_indices), row_indices)

    def open_heldout(self) -> OpenShards:
        """The shards of its held-out rows, to be closed by the caller."""
        shards = self.manifest.splits.heldout
        return OpenShards(self._files, shards, self.manifest.sequence_length, num_open=1, skip_corrupt=None)

    def token_counts(self, num_rows: int) -> np.ndarray:
        """How often each id occurs in the first `num_rows` training rows (or in all, if there are fewer), int64 [V]."""
        counts_V = np.zeros(self.manifest.vocab_size, np.int64)
        for index, shard in enumerate(self.manifest.splits.train):
            num_taken = min(num_rows, shard.rows)
            rows_BN = self._shards.read(np.full(num_taken, index), np.arange(num_taken))
            counts_V += np.bincount(rows_BN.reshape(-1), minlength=self.manifest.vocab_size)
            num_rows -= num_taken
            if not num_rows:
                break
        return counts_V

    def close(self) -> None:
        """Ends its threads."""
        self._shards.close()
