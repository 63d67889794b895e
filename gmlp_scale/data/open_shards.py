"""Reads rows from the shards of one split, and replaces or refuses corrupt shards."""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError
from gmlp_scale.data.shards import ROW_DTYPE, ShardRows

log = logging.getLogger(__name__)

_SHARDS_AT_A_TIME = 8
"""Opened by threads: copying and hashing release Python's lock, and a first batch may open dozens of shards."""


@dataclass
class SkipCorruptShards:
    """Allows up to `max_shards` corrupt shards; each is recorded in the file `record`, which all ranks share.

    A resumed run skips the recorded shards from its first step on, also those that were written again meanwhile. So it
    has the rows of a run that never stopped, on any number of ranks, if the shards were corrupt when they were first
    read. One that was sound until some step, or failed for one rank only, is skipped at the repeated steps by all.
    """

    record: Path
    max_shards: int
    prefix: str = ""
    """Stands before the names in the record, to tell a mixture's sources apart."""
    _unwritten: dict[str, str] = field(default_factory=dict, init=False)
    """What the disk refused: what was found, by the shard's name."""
    _is_failing: bool = field(default=False, init=False)

    def note(self, error: CorruptShardError) -> None:
        """Record a corrupt shard. Raises ShardError if all ranks together have now met too many."""
        name = self.prefix + error.name
        if name not in self._recorded():
            log.warning(
                "shard %s is corrupt and skipped: %s. A resumed run skips it too: to use it again, write or copy it "
                "again and delete its lines in %s",
                name,
                error.found,
                self.record,
            )
            self._unwritten[name] = error.found
            self.write()
        self.names()

    def names(self) -> set[str]:
        """The names of the source's recorded shards. Raises ShardError if those of all sources are too many."""
        recorded = self._recorded()
        if len(recorded) > self.max_shards:
            name, found = list(recorded.items())[-1]
            raise ShardError(
                f"{len(recorded)} shards are corrupt, data.max_corrupt_shards is {self.max_shards}; they are listed in "
                f"{self.record}, the last was {name} ({found}). Write or copy them again and delete their lines there, "
                "or raise data.max_corrupt_shards"
            )
        return {name.removeprefix(self.prefix) for name in recorded if name.startswith(self.prefix)}

    def write(self) -> None:
        """Adds what the record still lacks. Raises nothing: a failure is told once, until a write succeeds again."""
        try:
            for name, found in list(self._unwritten.items()):
                _append_line(self.record, json.dumps({"shard": name, "found": found}))
                del self._unwritten[name]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written (%s): free room there. Training goes on, and what is missing is written at "
                    "the first step that there is room for",
                    self.record,
                    error.strerror,
                )
            self._is_failing = True

    def close(self) -> None:
        """Tries a last time to write what the record still lacks."""
        self.write()
        if self._unwritten:
            names = ", ".join(self._unwritten)
            log.warning("%s lacks %s, which a resumed run reads if they are sound by then", self.record, names)

    def _recorded(self) -> dict[str, str]:
        """What was found, by the shard's name. Lines that a full disk or a kill cut short are left out."""
        recorded = {}
        for line in self.record.read_bytes().splitlines() if self.record.exists() else ():
            with suppress(ValueError, TypeError, KeyError):
                entry = json.loads(line)
                recorded[entry["shard"]] = entry["found"]
        return recorded | self._unwritten


def _append_line(path: Path, line: str) -> None:
    """Adds a line with a single write, so that the ranks' lines do not mix. It begins anew after one cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        file.seek(max(0, file.tell() - 1))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        content = start + line.encode() + b"\n"
        while content:  # a second write tells why the first was short
            content = content[file.write(content) :]


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
        self._files = files
        self._shards = shards
        self._sequence_length = sequence_length
        self._num_open = num_open
        self._skip_corrupt = skip_corrupt
        self._open: OrderedDict[int, ShardRows] = OrderedDict()
        self._coming: dict[int, Future[ShardRows | None]] = {}
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
        rows_BN = np.empty((len(row_indices_B), self._sequence_length), ROW_DTYPE)
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
        for index in self._coming.keys() - shards:  # this rank had no row to read there
            self._coming.pop(index).cancel()
        for index in self._open.keys() & shards:
            self._open.move_to_end(index)
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
            if index not in self._open and index not in self._coming and index not in self._corrupt:
                self._coming[index] = self._threads.submit(self._try_verified, index)

    def _try_verified(self, index: int) -> ShardRows | None:
        """None if it fails: `_opened` tries again and reports failures in a fixed order."""
        with suppress(ShardError, OSError):
            return self._verified(self._shards[index])

    def _opened(self, index: int) -> ShardRows:
        if index in self._coming and (shard := self._coming.pop(index).result()) is not None:
            self._open[index] = shard
        if index not in self._open:
            self._open[index] = self._verified(self._shards[index])
        self._open.move_to_end(index)
        return self._open[index]

    def _close_oldest(self) -> None:
        while self._open and len(self._open) + len(self._coming) > self._num_open:
            self._open.popitem(last=False)

    def _verified(self, shard: Shard) -> ShardRows:
        try:
            return ShardRows(self._files.local_path(shard), shard, self._sequence_length)
        except CorruptShardError:
            if not self._files.discard(shard):
                raise
        return ShardRows(self._files.local_path(shard), shard, self._sequence_length)
