"""The batches of pretraining: for each step the rank's rows, masked, made some steps ahead by a thread."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field, model_validator

from gmlp_scale.data.batch import IGNORED, MaskedBatch, num_masked_positions
from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.masking import mask_rows
from gmlp_scale.data.open_shards import OpenShards, SkipCorruptShards
from gmlp_scale.data.order import RowAddresses, RowOrder
from gmlp_scale.data.shards import Manifest, Shard, ShardError

_HELDOUT_SEED = 0
_CACHE_MAX_BYTES = 500_000_000_000


class DataConfig(BaseModel, frozen=True, extra="forbid"):
    shards: str
    """Folder that data_prep/tokenize_corpus.py wrote: a path or a URL that fsspec opens."""
    cache_dir: str | None = None
    """Local folder that shards are copied to when they are first read; a URL needs one. With room for all shards a node
    fetches each once, else most of them in every epoch."""
    cache_max_bytes: int = Field(default=_CACHE_MAX_BYTES, ge=1)
    """Beyond this the copies that were used longest ago are removed, a tenth of it at once; one limit for all ranks of
    a node. [bytes]"""
    packing: Literal["packed", "document"] = "packed"
    """How documents were put into rows; the shards must have been written so."""
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """How much of each row is masked (BERT's 15 %, as in the paper). [fraction]"""
    shuffle_group_bytes: int = Field(default=200_000_000, ge=1)
    """Rows are shuffled within groups of shards of about this size. A rank keeps about two groups in memory. [bytes]"""
    prefetch_steps: int = Field(default=64, ge=1)
    """How many steps' batches are made ahead; they take 10 bytes of host memory per token. [steps]"""
    on_corrupt_shard: Literal["error", "skip"] = "error"
    """A shard whose checksum does not hold: end the run, or go on without its rows."""
    max_corrupt_shards: int = Field(default=0, ge=0)
    """How many distinct corrupt shards a run may skip. [shards]"""

    @property
    def padded(self) -> bool:
        """Whether attention must ignore <pad>. Packed rows have nearly none: a writer fills all but its last."""
        return self.packing == "document"

    @model_validator(mode="after")
    def _settings_take_effect(self):
        if (self.on_corrupt_shard == "skip") != (self.max_corrupt_shards > 0):
            raise ValueError(
                f"on_corrupt_shard={self.on_corrupt_shard} with max_corrupt_shards={self.max_corrupt_shards}: "
                "skip needs max_corrupt_shards of at least 1, error needs 0"
            )
        if self.cache_dir is None and self.cache_max_bytes != _CACHE_MAX_BYTES:
            raise ValueError(
                f"cache_max_bytes={self.cache_max_bytes} without a cache_dir has nothing to limit: set cache_dir, or "
                f"leave cache_max_bytes at {_CACHE_MAX_BYTES}"
            )
        return self


class Loader:
    """The batches of a run for one rank.

    Step t, counted from 0, takes the rows at [t*B, (t+1)*B) of the order, whatever the number of ranks. This rank takes
    its consecutive slice of them. Every batch is a pure function of the step.

    run_dir: where the corrupt shards that were skipped are recorded.
    Raises ShardError if the shards do not fit the recipe, FileNotFoundError if there are none.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        sequence_length: int,
        vocab_size: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        run_dir: Path,
    ):
        if global_batch_size % (world_size * micro_batch_size):
            raise ValueError(
                f"train.global_batch_size={global_batch_size} does not divide by world size {world_size} x "
                f"train.micro_batch_size={micro_batch_size}: change one of the three"
            )
        self.manifest = Manifest.load(config.shards)
        check_fit(self.manifest, config, sequence_length, vocab_size)
        self.rows = self.manifest.num_rows("train")
        self.steps_per_epoch = self.rows / global_batch_size
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._prefetch_steps = config.prefetch_steps
        self._vocab_size = vocab_size
        self._padded = config.padded
        self._num_masked = num_masked_positions(sequence_length, config.masked_fraction)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._files = ShardFiles(config.shards, config.cache_dir, max_bytes=config.cache_max_bytes)

        shards = self.manifest.splits.train
        shards_per_group = max(1, config.shuffle_group_bytes * len(shards) // sum(shard.bytes for shard in shards))
        self._order = RowOrder(_rows_per_shard(shards), shards_per_group=shards_per_group, seed=seed)
        self._shards = OpenShards(
            self._files,
            shards,
            sequence_length,
            num_open=2 * shards_per_group + 8,
            skip_corrupt=SkipCorruptShards(run_dir / "corrupt_shards.jsonl", config.max_corrupt_shards)
            if config.on_corrupt_shard == "skip"
            else None,
        )

    def epoch(self, step: int) -> int:
        """Epoch of the first row of `step`."""
        return step * self._global_batch_size // self.rows

    def positions(self, step: int) -> range:
        """Positions in the training order whose rows this rank takes at `step`."""
        num_own = self._global_batch_size // self._world_size
        first = step * self._global_batch_size + self._rank * num_own
        return range(first, first + num_own)

    def addresses(self, step: int) -> RowAddresses:
        """Where the rows of `positions(step)` are stored."""
        return self._order.locate(np.array(self.positions(step)))

    def micro_batches(self, step: int) -> list[MaskedBatch]:
        """This rank's micro-batches of `step`, in order. CorruptShardError if a corrupt shard is not skipped."""
        addresses = self.addresses(step)
        rows_BN = self._shards.read(addresses.shard, addresses.row_index)
        batch = self._mask(rows_BN, addresses.epoch, addresses.global_row_index, seed=self._seed)
        return batch.split(self._micro_batch_size)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MaskedBatch]]:
        """The micro-batches of each step in [start_step, stop_step); a thread makes them `prefetch_steps` ahead.

        While a group of shards is read, the next one is opened.
        """

        def make(step: int) -> list[MaskedBatch]:
            micro_batches = self.micro_batches(step)
            last_position, stop = self.positions(step)[-1], stop_step * self._global_batch_size
            self._shards.open_ahead(self._order.shards_ahead(last_position, stop))
            return micro_batches

        coming = deque()
        next_step = start_step
        try:
            for step in range(start_step, stop_step):
                while next_step < min(stop_step, step + self._prefetch_steps + 1):
                    coming.append(self._thread.submit(make, next_step))
                    next_step += 1
                started = time.perf_counter()
                micro_batches = coming.popleft().result()
                self.wait_seconds += time.perf_counter() - started
                yield micro_batches
        finally:
            for future in coming:
                future.cancel()

    def close(self) -> None:
        """End the threads behind `steps`."""
        self._thread.shutdown(cancel_futures=True)
        self._shards.close()

    def heldout_batches(self, num_rows: int) -> Iterator[MaskedBatch]:
        """This rank's share of the first `num_rows` held-out rows (or of all, if there are fewer), in micro-batches.

        Rows and masks are the same at every evaluation, for every seed and world size. Every rank has the same number
        of batches; the rows that fill up the last ones have all their labels IGNORED.
        """
        shards = self.manifest.splits.heldout
        if not shards:
            raise ShardError("the shards have no held-out rows: write them with tokenize_corpus.py --heldout-fraction")
        num_rows = min(num_rows, self.manifest.num_rows("heldout"))
        first_rows = np.concatenate([[0], np.cumsum(_rows_per_shard(shards))])
        num_own = self._micro_batch_size
        opened = OpenShards(self._files, shards, self.manifest.sequence_length, num_open=1, skip_corrupt=None)
        with closing(opened):
            for start in range(self._rank * num_own, num_rows + self._rank * num_own, num_own * self._world_size):
                row_indices = np.arange(start, start + num_own)
                is_filler = row_indices >= num_rows
                row_indices[is_filler] = 0
                shard = np.searchsorted(first_rows, row_indices, side="right") - 1
                rows_BN = opened.read(shard, row_indices - first_rows[shard])
                batch = self._mask(rows_BN, np.zeros_like(row_indices), row_indices, seed=_HELDOUT_SEED)
                batch.labels_BM.numpy()[is_filler] = IGNORED
                yield batch

    def token_counts(self, num_rows: int) -> np.ndarray:
        """How often each id occurs in the first `num_rows` training rows (or in all, if there are fewer), int64 [V]."""
        counts_V = np.zeros(self._vocab_size, np.int64)
        for index, shard in enumerate(self.manifest.splits.train):
            num_taken = min(num_rows, shard.rows)
            rows_BN = self._shards.read(np.full(num_taken, index), np.arange(num_taken))
            counts_V += np.bincount(rows_BN.reshape(-1), minlength=self._vocab_size)
            num_rows -= num_taken
            if not num_rows:
                break
        return counts_V

    def fingerprint(self) -> dict[str, str | int]:
        """Facts of the data that a resumed run must find again."""
        manifest = self.manifest
        return {
            "manifest_sha256": manifest.sha256,
            "tokenizer_sha256": manifest.tokenizer_sha256,
            "sequence_length": manifest.sequence_length,
            "vocab_size": manifest.vocab_size,
            "packing": manifest.packing,
            "train_rows": manifest.num_rows("train"),
            "heldout_rows": manifest.num_rows("heldout"),
        }

    def _mask(self, rows_BN: np.ndarray, epochs_B: np.ndarray, row_indices_B: np.ndarray, *, seed: int) -> MaskedBatch:
        batch = mask_rows(
            rows_BN, epochs_B, row_indices_B, seed=seed, num_masked=self._num_masked, vocab_size=self._vocab_size
        )
        return replace(batch, padded=self._padded)


def _rows_per_shard(shards: tuple[Shard, ...]) -> np.ndarray:
    return np.array([shard.rows for shard in shards])


def check_fit(manifest: Manifest, config: DataConfig, sequence_length: int, vocab_size: int) -> None:
    """Raises ShardError, which names everything in which the shards and the recipe disagree."""
    compared = [
        ("model.sequence_length", sequence_length, manifest.sequence_length),
        ("model.vocab_size", vocab_size, manifest.vocab_size),
        ("data.packing", config.packing, manifest.packing),
    ]
    mistakes = [f"{field} is {wanted}, the shards have {found}" for field, wanted, found in compared if wanted != found]
    if num_masked_positions(sequence_length, config.masked_fraction) < 1:
        mistakes.append(f"data.masked_fraction={config.masked_fraction} masks none of {sequence_length} positions")
    if not manifest.splits.train:
        mistakes.append("the shards have no training rows")
    if mistakes:
        raise ShardError(
            f"the shards at {config.shards} do not fit the recipe: {'; '.join(mistakes)}. "
            "Change the recipe, or write other shards with data_prep/tokenize_corpus.py"
        )
