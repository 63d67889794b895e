"""Reads rows from the shards of one split, and replaces or refuses corrupt shards."""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError
from gmlp_scale.data.shards import ROW_DTYPE, ShardRows
from gmlp_scale.storage.growing_file import SharedLines

log = logging.getLogger(__name__)

_SHARDS_AT_A_TIME = 8
"""Opened by threads: copying and hashing release Python's lock, and a first batch may open dozens of shards."""


class SkipCorruptShards:
    """Allows up to `max_shards` corrupt shards; each is recorded in the file `record`, which all ranks share.

    A resumed run skips the recorded shards from its first step on, also those that were written again meanwhile. So it
    has the rows of a run that never stopped, on any number of ranks, if the shards were corrupt when they were first
    read. One that was sound until some step, or failed for one rank only, is skipped at the repeated steps by all.

    prefix: stands before the names in the record, so that a mixture's sources differ.
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
        shards: Sequence[Shard],
        sequence_length: int,
        *,
        num_open: int,
        skip_corrupt: SkipCorruptShards | None,
    ):
        self._files, self._shards, self.sequence_length = files, shards, sequence_length
        self._num_open, self._skip_corrupt = num_open, skip_corrupt
        self._open: OrderedDict[int, Future[ShardRows]] = OrderedDict()  # the shard used last comes last
        self._threads = ThreadPoolExecutor(_SHARDS_AT_A_TIME, thread_name_prefix="open")
        recorded = skip_corrupt.names() if skip_corrupt else set()
        self._corrupt = {index for index, shard in enumerate(shards) if shard.name in recorded}
        if self._corrupt:
            log.info("%d shards are skipped, as recorded in %s", len(self._corrupt), skip_corrupt.record)

    def read(self, shards_B: np.ndarray, row_indices_B: np.ndarray) -> np.ndarray:
        """The rows with these indices within the shards with these indices, uint16 [B, N].

        If corrupt shards are skipped, the next sound shard in the manifest's order takes a corrupt one's place: ranks
        need not talk to agree. Otherwise raises CorruptShardError.
        """
        wanted = np.unique(shards_B).tolist()
        self._start_opening(wanted)
        rows_BN = np.empty((len(row_indices_B), self.sequence_length), ROW_DTYPE)
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
        return self._files.opened(shard, lambda path: ShardRows(path, shard, self.sequence_length))
