"""The rows of one source: one folder of shards, its order, its epochs and its masks. And of several, row by row.

Threads open the shards. A corrupt one is replaced by the next, or refused.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gmlp_scale.data.data_config import DataConfig
from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError, ShardFiles, Split
from gmlp_scale.data.mixture import source_seed
from gmlp_scale.data.order import RowAddresses, RowOrder, first_rows, places_in_shards
from gmlp_scale.data.shards import Manifest, ShardRows
from gmlp_scale.storage.growing_file import SharedLines

log = logging.getLogger(__name__)

_HELDOUT_SEED = 0
_SHARDS_AT_A_TIME = 8
"""Opened by threads: copying and hashing release Python's lock, and a first batch may open dozens of shards."""


class SkipCorruptShards:
    """Allows up to `max_shards` corrupt shards; each is recorded in the file `record`, which all ranks share.

    A resumed run skips the recorded shards from its first step on, also those that were written again meanwhile. So it
    has the rows of a run that never stopped, on any number of ranks, if the shards were corrupt when they were first
    read. One that was sound until some step, or failed for one rank only, is skipped at the repeated steps by all.

    prefix: stands before the names in the record, so that a mixture's sources differ. The first source has none, so a
    run that gets more sources knows its shards again.
    """

    def __init__(self, record: Path, max_shards: int, prefix: str = ""):
        self.record, self.max_shards, self.prefix = record, max_shards, prefix
        self._lines = SharedLines(record)

    def note(self, error: CorruptShardError) -> None:
        """Records a corrupt shard. Raises ShardError if all ranks together have now met too many."""
        name = self.prefix + error.name
        if name not in self._recorded(self._lines.lines()):
            log.warning(
                "shard %s is corrupt and skipped: %s. A resumed run skips it too: to use it again, write or copy it "
                "again and delete its lines in %s",
                name,
                error.found,
                self.record,
            )
            self._lines.write(json.dumps({"shard": name, "found": error.found}).encode())
        self.names()

    def names(self) -> set[str]:
        """The names of the source's recorded shards. Raises ShardError if those of all sources are too many."""
        recorded = self._recorded(self._lines.lines())
        if len(recorded) > self.max_shards:
            name, found = list(recorded.items())[-1]
            raise ShardError(
                f"{len(recorded)} shards are corrupt, data.max_corrupt_shards is {self.max_shards}; they are listed in "
                f"{self.record}, the last was {name} ({found}). Write or copy them again and delete their lines there, "
                "or raise data.max_corrupt_shards"
            )
        return {name.removeprefix(self.prefix) for name in recorded if name.startswith(self.prefix)}

    def write(self) -> None:
        """Adds what the record lacks since the disk was full."""
        self._lines.write()

    def close(self) -> None:
        self.write()
        if missing := ", ".join(self._recorded(self._lines.unwritten)):
            log.warning("%s lacks %s, which a resumed run reads if they are sound by then", self.record, missing)

    def _recorded(self, lines: Iterable[bytes]) -> dict[str, str]:
        """What was found, by the shard's name. Lines that a full disk or a kill cut short are left out."""
        recorded = {}
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                recorded[entry["shard"]] = entry["found"]
        return recorded


class OpenShards:
    """The shards of one split. Threads open and verify each before it is read; the `num_open` used last stay open."""

    def __init__(
        self,
        files: ShardFiles,
        manifest: Manifest,
        split: Split,
        *,
        num_open: int,
        skip_corrupt: SkipCorruptShards | None,
    ):
        self.files, self.manifest, self._shards = files, manifest, getattr(manifest.splits, split)
        self._num_open, self._skip_corrupt = num_open, skip_corrupt
        self._open: OrderedDict[int, Future[ShardRows]] = OrderedDict()  # the shard used last comes last
        self._threads = ThreadPoolExecutor(_SHARDS_AT_A_TIME, thread_name_prefix="open")
        recorded = skip_corrupt.names() if skip_corrupt else set()
        self._corrupt = {index for index, shard in enumerate(self._shards) if shard.name in recorded}
        if self._corrupt:
            log.info("%d shards are skipped, as recorded in %s", len(self._corrupt), skip_corrupt.record)

    def read(self, shards_B: np.ndarray, row_indices_B: np.ndarray) -> np.ndarray:
        """The rows with these indices within the shards with these indices, uint16 or uint32 [B, N].

        If corrupt shards are skipped, the next sound shard in the manifest's order takes a corrupt one's place: ranks
        need not talk to agree. Otherwise raises CorruptShardError.
        """
        wanted = np.unique(shards_B).tolist()
        self._start_opening(wanted)
        rows_BN = np.empty((len(row_indices_B), self.manifest.sequence_length), self.manifest.row_dtype)
        for index in wanted:
            places = np.flatnonzero(shards_B == index)
            shard, num_rows = self._sound_shard(index)
            rows_BN[places] = shard.read(row_indices_B[places] % num_rows)
        self._close_oldest()
        if self._skip_corrupt:
            self._skip_corrupt.write()
        return rows_BN

    def open_ahead(self, shards: Sequence[int]) -> None:
        """Starts to open the shards that the next reads may need, unless they are more than may be open."""
        if len(shards) > self._num_open:
            return
        for index in self._open.keys() - shards:
            if not self._open[index].done():  # this rank had no row to read there
                self._open.pop(index).cancel()
        self._start_opening(shards)
        self._close_oldest()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(cancel_futures=True)
        if self._skip_corrupt:
            self._skip_corrupt.close()

    def _sound_shard(self, index: int) -> tuple[ShardRows, int]:
        for candidate in (*range(index, len(self._shards)), *range(index)):
            if candidate in self._corrupt:
                continue
            try:
                return self._opened(candidate), self._shards[candidate].rows
            except CorruptShardError as error:
                if self._skip_corrupt is None:
                    raise
                self._skip_corrupt.note(error)
                self._corrupt.add(candidate)
        raise ShardError("every shard of the split is corrupt: write or copy them again")

    def _start_opening(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in self._corrupt:
                self._open[index] = self._open.get(index) or self._threads.submit(self._verified, self._shards[index])
                self._open.move_to_end(index)

    def _opened(self, index: int) -> ShardRows:
        for _ in range(2):  # what could not be opened ahead is tried again
            self._start_opening([index])
            shard = self._open[index]
            if shard.exception() is None:
                break
            del self._open[index]
        return shard.result()

    def _close_oldest(self) -> None:
        while len(self._open) > self._num_open:
            self._open.popitem(last=False)

    def _verified(self, shard: Shard) -> ShardRows:
        length, dtype = self.manifest.sequence_length, self.manifest.row_dtype
        return self.files.opened(shard, lambda path: ShardRows(path, shard, length, dtype))


class Source(OpenShards):
    """The training rows of one folder of shards.

    Args:
        config: the recipe's `data` section.
        place: the source's place in its list, by which each source draws otherwise; 0 for a single source.
        seed: the run's.
        run_dir: where the corrupt shards that were skipped are recorded.
    """

    def __init__(self, config: DataConfig, place: int, manifest: Manifest, *, seed: int, run_dir: Path):
        self.config, self.place = config.sources[place], place
        self.num_rows = manifest.num_rows("train")
        self.seed = source_seed(seed, place)
        """Decides the order and the masks of its rows."""
        skip_corrupt = None
        if config.on_corrupt_shard == "skip":
            prefix = f"source_{place}/" if place else ""  # its name may change when sources are added, its place not
            skip_corrupt = SkipCorruptShards(run_dir / "corrupt_shards.jsonl", config.max_corrupt_shards, prefix)
        self._order = RowOrder.of_shards(manifest.splits.train, group_bytes=config.shuffle_group_bytes, seed=self.seed)
        files = ShardFiles(self.config.shards, config.cache_dir, max_bytes=config.cache_max_bytes)
        num_open = 2 * self._order.shards_per_group + 8
        super().__init__(files, manifest, "train", num_open=num_open, skip_corrupt=skip_corrupt)

    def locate(self, positions: np.ndarray) -> RowAddresses:
        """Addresses of its rows at these positions, which count its own rows through all its epochs."""
        return self._order.locate(positions)

    def read(self, shards_B: np.ndarray, row_indices_B: np.ndarray) -> np.ndarray:
        try:
            return super().read(shards_B, row_indices_B)
        except CorruptShardError as error:
            skip = ", or set data.on_corrupt_shard=skip and data.max_corrupt_shards"
            raise CorruptShardError(error.name, error.found, skip) from error

    def open_groups_ahead(self, position: int, stop: int) -> None:
        """Starts to open the shards of the group at `position` and of the next one, unless that begins at `stop`."""
        self.open_ahead(self._order.shards_ahead(position, stop))

    def token_counts(self, num_rows: int) -> np.ndarray:
        """How often each id occurs in the first `num_rows` training rows (or in all, if there are fewer), int64 [V]."""
        counts_V = np.zeros(self.manifest.vocab_size, np.int64)
        for index, shard in enumerate(self.manifest.splits.train):
            num_taken = min(num_rows, shard.rows)
            rows_BN = self.read(np.full(num_taken, index), np.arange(num_taken))
            counts_V += np.bincount(rows_BN.reshape(-1), minlength=self.manifest.vocab_size)
            num_rows -= num_taken
            if not num_rows:
                break
        return counts_V


class HeldoutRows(OpenShards):
    """The held-out rows of one source. Their masks are the same in every run."""

    def __init__(self, source: Source):
        super().__init__(source.files, source.manifest, "heldout", num_open=1, skip_corrupt=None)
        self.seed = source_seed(_HELDOUT_SEED, source.place)
        self._first_rows = first_rows(shard.rows for shard in self._shards)

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
    """The rows at these addresses, uint16 or uint32 [P, N]."""
    first = sources[0].manifest
    rows_PN = np.empty((len(addresses.source), first.sequence_length), first.row_dtype)
    for place in np.unique(addresses.source).tolist():
        own = addresses.source == place
        rows_PN[own] = sources[place].read(addresses.shard[own], addresses.row_index[own])
    return rows_PN
