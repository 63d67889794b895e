"""The rows of one source: one folder of shards, its order, its epochs and its masks. And of several, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.data_config import DataConfig
from gmlp_scale.data.manifest import CorruptShardError, Shard
from gmlp_scale.data.mixture import source_seed
from gmlp_scale.data.open_shards import OpenShards, SkipCorruptShards
from gmlp_scale.data.order import RowAddresses, RowOrder, first_rows, places_in_shards
from gmlp_scale.data.shards import ROW_DTYPE, Manifest

_HELDOUT_SEED = 0


class Source:
    """The training rows of one folder of shards.

    Args:
        config: the recipe's `data` section.
        place: the source's place in its list, by which each source draws otherwise; 0 for a single source.
        seed: the run's.
        run_dir: where the corrupt shards that were skipped are recorded.
    """

    def __init__(self, config: DataConfig, place: int, manifest: Manifest, *, seed: int, run_dir: Path):
        self.config, self.manifest, self._place = config.sources[place], manifest, place
        self.num_rows, self.sequence_length = manifest.num_rows("train"), manifest.sequence_length
        self.seed = source_seed(seed, place)
        """Decides the order and the masks of its rows."""
        shards, skip_corrupt = manifest.splits.train, None
        if config.on_corrupt_shard == "skip":
            prefix = f"{self.config.name}/" if config.is_mixture else ""
            skip_corrupt = SkipCorruptShards(run_dir / "corrupt_shards.jsonl", config.max_corrupt_shards, prefix)
        self._order = RowOrder.of_shards(shards, group_bytes=config.shuffle_group_bytes, seed=self.seed)
        self._files = ShardFiles(self.config.shards, config.cache_dir, max_bytes=config.cache_max_bytes)
        num_open = 2 * self._order.shards_per_group + 8
        self._shards = OpenShards(
            self._files, shards, manifest.sequence_length, num_open=num_open, skip_corrupt=skip_corrupt
        )

    def locate(self, positions: np.ndarray) -> RowAddresses:
        """Addresses of its rows at these positions, which count its own rows through all its epochs."""
        return self._order.locate(positions)

    def read(self, shards: np.ndarray, row_indices: np.ndarray) -> np.ndarray:
        """Its rows, uint16 [P, N], by their numbers within their shards. CorruptShardError as OpenShards.read."""
        try:
            return self._shards.read(shards, row_indices)
        except CorruptShardError as error:
            skip = ", or set data.on_corrupt_shard=skip and data.max_corrupt_shards"
            raise CorruptShardError(error.name, error.found, skip) from error

    def open_ahead(self, position: int, stop: int) -> None:
        """Starts to open the shards of the group at `position` and of the next one, unless that begins at `stop`."""
        self._shards.open_ahead(self._order.shards_ahead(position, stop))

    def open_heldout(self) -> "HeldoutRows":
        """Its held-out rows, to be closed by the caller."""
        return HeldoutRows(
            self._files,
            self.manifest.splits.heldout,
            self.manifest.sequence_length,
            seed=source_seed(_HELDOUT_SEED, self._place),
        )

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


class HeldoutRows(OpenShards):
    """The held-out rows of one source. `seed` decides their masks, which are the same in every run."""

    def __init__(self, files: ShardFiles, shards: Sequence[Shard], sequence_length: int, *, seed: int):
        super().__init__(files, shards, sequence_length, num_open=1, skip_corrupt=None)
        self.seed = seed
        self._first_rows = first_rows(shards)

    def locate(self, row_indices: np.ndarray) -> RowAddresses:
        """Addresses of the rows with these numbers in the split."""
        return RowAddresses(np.zeros_like(row_indices), *places_in_shards(self._first_rows, row_indices), row_indices)


RowSource = Source | HeldoutRows


@dataclass(frozen=True)
class BatchAddresses(RowAddresses):
    """Where the rows of a batch are stored, each in its source."""

    source: np.ndarray
    """Index of the source in the recipe's list, int64 [P]."""
    position: np.ndarray
    """The row's place in its source's own order, int64 [P]."""


def locate_rows(sources: Sequence[RowSource], source_of_row: np.ndarray, positions: np.ndarray) -> BatchAddresses:
    """The addresses of the rows at these positions of their sources."""
    columns = np.empty((4, len(positions)), np.int64)
    for place in np.unique(source_of_row).tolist():
        own = source_of_row == place
        found = sources[place].locate(positions[own])
        columns[:, own] = found.epoch, found.shard, found.row_index, found.global_row_index
    return BatchAddresses(*columns, source=source_of_row, position=positions)


def read_rows(sources: Sequence[RowSource], addresses: BatchAddresses) -> np.ndarray:
    """The rows at these addresses, uint16 [P, N]."""
    rows_PN = np.empty((len(addresses.source), sources[0].sequence_length), ROW_DTYPE)
    for place in np.unique(addresses.source).tolist():
        own = addresses.source == place
        rows_PN[own] = sources[place].read(addresses.shard[own], addresses.row_index[own])
    return rows_PN
