"""The batches of pretraining: for each step the rank's rows, masked, made some steps ahead by a thread."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gmlp_scale.data.batch import IGNORED, MaskedBatch, num_masked_positions
from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.data_config import DataConfig, load_manifests
from gmlp_scale.data.fingerprint import fingerprint
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.masking import mask_rows
from gmlp_scale.data.mixture import Mixture, Pattern, SourceConfig
from gmlp_scale.data.open_shards import SkipCorruptShards
from gmlp_scale.data.order import RowAddresses, positions_of_rank
from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.source import Source
from gmlp_scale.errors import InputError
from gmlp_scale.piecewise import Piecewise


class Loader:
    """The batches of a run for one rank.

    Step t, counted from 0, takes the rows of the order that follow those of all steps before it. This rank takes its
    consecutive slice of them (`positions_of_rank`). Every batch is a pure function of the step. The rows of a mixture
    stand in the batch in the order of its pattern, so every micro-batch has nearly the shares of the whole batch. Which
    rows of a source come next is shuffled.

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
        global_batch_size: int | Sequence[tuple[int, int]],
        micro_batch_size: int,
        rank: int,
        world_size: int,
        run_dir: Path,
    ):
        batch_sizes = Piecewise(global_batch_size)
        if any(rows % (world_size * micro_batch_size) for rows in batch_sizes.values):
            raise InputError(
                f"train.global_batch_size={batch_sizes.told()} does not divide by world size {world_size} x "
                f"train.micro_batch_size={micro_batch_size}: change one of the three"
            )
        manifests = load_manifests(config, sequence_length, vocab_size)
        self.config = config
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self._batch_sizes = batch_sizes
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._vocab_size = vocab_size
        self._num_masked = config.masked_fractions.map(partial(num_masked_positions, sequence_length))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._mixture = Mixture(config.sources, batch_sizes)
        self.sources = [
            Source(
                source,
                manifest,
                ShardFiles(source.shards, config.cache_dir, max_bytes=config.cache_max_bytes),
                place=place,
                seed=seed,
                shuffle_group_bytes=config.shuffle_group_bytes,
                skip_corrupt=_skip_corrupt(config, source, run_dir),
            )
            for place, (source, manifest) in enumerate(zip(config.sources, manifests, strict=True))
        ]
        self.num_rows = sum(source.num_rows for source in self.sources)
        """Training rows of all sources."""
        num_heldout = [manifest.num_rows("heldout") for manifest in manifests]
        lasting = [source.weight if source.until_step is None else 0.0 for source in config.sources]
        weights = [weight if rows else 0.0 for weight, rows in zip(lasting, num_heldout, strict=True)]
        self._heldout = Pattern(weights) if any(weights) else None
        self.num_heldout_rows = self._heldout.num_rows_of(num_heldout) if self._heldout else 0
        """How many rows `heldout_batches` can give before one of its sources has none left."""

    def epochs(self, step: int) -> dict[str, float]:
        """How often the rows of each source have been seen before the batch of `step`, by the tags of the metrics."""
        counts = self._mixture.counts(step)
        epochs = [count / source.num_rows for count, source in zip(counts.tolist(), self.sources, strict=True)]
        if not self.config.is_mixture:
            return {"data/epoch": epochs[0]}
        return {f"data/epoch/{s.config.name}": epoch for s, epoch in zip(self.sources, epochs, strict=True)}

    def positions(self, step: int) -> range:
        """Positions in the training order whose rows this rank takes at `step`."""
        return positions_of_rank(self._batch_sizes, step, self._rank, self._world_size)

    def sources_of_rows(self, step: int) -> np.ndarray:
        """Which of `sources` each row of `positions(step)` is from, int64 [P]."""
        return self._located(step)[0]

    def addresses(self, step: int) -> RowAddresses:
        """Where the rows of `positions(step)` are stored in their sources."""
        return _by_source(*self._located(step), [source.locate for source in self.sources])

    def micro_batches(self, step: int) -> list[MaskedBatch]:
        """This rank's micro-batches of `step`, in order. CorruptShardError if a corrupt shard is not skipped."""
        seeds = [source.seed for source in self.sources]
        readers = [source.read for source in self.sources]
        num_masked = self._num_masked.at(step)
        batch = self._masked(self.sources_of_rows(step), self.addresses(step), readers, seeds, num_masked)
        return batch.split(self._micro_batch_size)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MaskedBatch]]:
        """The micro-batches of each step in [start_step, stop_step); a thread makes them `prefetch_steps` ahead.

        While a group of shards is read, the next one is opened.
        """

        def make(step: int) -> list[MaskedBatch]:
            micro_batches = self.micro_batches(step)
            chosen, positions = self._located(step)
            for place in np.unique(chosen).tolist():
                self.sources[place].open_ahead(int(positions[chosen == place][-1]), int(stops[place]))
            return micro_batches

        stops = self._mixture.counts(stop_step)
        coming = deque()
        next_step = start_step
        try:
            for step in range(start_step, stop_step):
                while next_step < min(stop_step, step + self.config.prefetch_steps + 1):
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
        for source in self.sources:
            source.close()

    def heldout_batches(self, num_rows: int) -> Iterator[MaskedBatch]:
        """This rank's share of the first `num_rows` held-out rows (or of all, if there are fewer), in micro-batches.

        They come from all sources that have held-out rows and last to the run's end, in the shares of their weights.
        Rows and masks are the same at every evaluation, for every seed and world size. Every rank has the same number
        of batches; the rows that fill up the last ones have all their labels IGNORED.
        """
        if not self._heldout:
            raise ShardError("the shards have no held-out rows: write them with tokenize_corpus.py --heldout-fraction")
        num_rows = min(num_rows, self.num_heldout_rows)
        num_own, seeds = self._micro_batch_size, [source.heldout_seed for source in self.sources]
        with ExitStack() as stack:
            readers = [stack.enter_context(closing(source.open_heldout())).read for source in self.sources]
            locators = [source.locate_heldout for source in self.sources]
            for start in range(self._rank * num_own, num_rows + self._rank * num_own, num_own * self._world_size):
                positions = np.arange(start, start + num_own)
                is_filler = positions >= num_rows
                positions[is_filler] = 0
                chosen, row_indices = self._heldout.locate(positions)
                addresses = _by_source(chosen, row_indices, locators)
                batch = self._masked(chosen, addresses, readers, seeds, self._num_masked.last)
                batch.labels_BM.numpy()[is_filler] = IGNORED
                yield batch

    def fingerprint(self) -> dict[str, Any]:
        """Facts of the data that a resumed run must find again."""
        return fingerprint(self.sources, self.num_heldout_rows, self.config.is_mixture)

    def _located(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row of `positions(step)`: which of `sources` it is from, and its position in that source's order."""
        return self._mixture.locate(np.array(self.positions(step)))

    def _masked(
        self,
        chosen_B: np.ndarray,
        addresses: RowAddresses,
        readers: list[Callable[[np.ndarray, np.ndarray], np.ndarray]],
        seeds: list[int],
        num_masked: int,
    ) -> MaskedBatch:
        """The rows at `addresses` of the sources `chosen_B`, read by each source's reader and masked by its seed."""
        rows_BN = np.empty((len(chosen_B), self.sources[0].manifest.sequence_length), ROW_DTYPE)
        for place in np.unique(chosen_B).tolist():
            own = chosen_B == place
            rows_BN[own] = readers[place](addresses.shard[own], addresses.row_index[own])
        batch = mask_rows(
            rows_BN,
            addresses.epoch,
            addresses.global_row_index,
            seed=np.array(seeds, np.uint64)[chosen_B],
            num_masked=num_masked,
            vocab_size=self._vocab_size,
        )
        return replace(batch, padded=self.config.padded)


def _by_source(
    chosen: np.ndarray, positions: np.ndarray, locators: list[Callable[[np.ndarray], RowAddresses]]
) -> RowAddresses:
    """The addresses of the rows at these positions of the sources `chosen`, found by each source's locator."""
    columns = np.empty((4, len(chosen)), np.int64)
    for place in np.unique(chosen).tolist():
        own = chosen == place
        found = locators[place](positions[own])
        columns[:, own] = found.epoch, found.shard, found.row_index, found.global_row_index
    return RowAddresses(*columns)


def _skip_corrupt(config: DataConfig, source: SourceConfig, run_dir: Path) -> SkipCorruptShards | None:
    if config.on_corrupt_shard == "error":
        return None
    prefix = f"{source.name}/" if config.is_mixture else ""
    return SkipCorruptShards(run_dir / "corrupt_shards.jsonl", config.max_corrupt_shards, prefix)
