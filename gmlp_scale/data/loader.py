"""The batches of pretraining: for each step the rank's rows, masked, made some steps ahead by a thread."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gmlp_scale.data.batch import IGNORED, MaskedBatch, num_masked_positions
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, fingerprint, load_manifests
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.masking import mask_rows
from gmlp_scale.data.mixture import Mixture, Pattern
from gmlp_scale.data.source import BatchAddresses, HeldoutRows, RowSource, Source, locate_rows, read_rows


class Loader:
    """The batches of a run for one rank, as its plan says.

    The rows of a mixture stand in the batch in the order of its pattern, so every micro-batch has nearly the shares of
    the whole batch. Which rows of a source come next is shuffled.

    run_dir: where the corrupt shards that were skipped are recorded.
    Raises ShardError if the shards do not fit the recipe, FileNotFoundError if there are none.
    """

    def __init__(self, config: DataConfig, plan: BatchPlan, *, sequence_length: int, vocab_size: int, run_dir: Path):
        manifests = load_manifests(config, sequence_length, vocab_size)
        self.config, self.plan = config, plan
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self._num_masked = config.masked_fractions.map(partial(num_masked_positions, sequence_length))
        self._mixture = Mixture(config.sources, plan.batch_sizes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.sources = [
            Source(config, place, manifest, seed=plan.seed, run_dir=run_dir) for place, manifest in enumerate(manifests)
        ]
        self.num_rows = sum(source.num_rows for source in self.sources)
        """Training rows of all sources."""
        num_heldout = [manifest.num_rows("heldout") for manifest in manifests]
        lasts = [source.until_step is None for source in config.sources]
        weights = [
            source.weight if last and rows else 0.0
            for source, last, rows in zip(config.sources, lasts, num_heldout, strict=True)
        ]
        self._heldout = Pattern(weights) if any(weights) else None
        self.num_heldout_rows = self._heldout.num_rows_of(num_heldout) if self._heldout else 0
        """How many rows `heldout_batches` can give before one of its sources has none left."""

    def epochs(self, step: int) -> dict[str, float]:
        """How often the rows of each source have been seen before the batch of `step`, by the tags of the metrics."""
        names = [f"/{source.config.name}" for source in self.sources] if self.config.is_mixture else [""]
        counts = self._mixture.counts(step).tolist()
        sources = zip(names, counts, self.sources, strict=True)
        return {f"data/epoch{name}": count / source.num_rows for name, count, source in sources}

    def addresses(self, step: int) -> BatchAddresses:
        """Where the rows that this rank takes at `step` are stored."""
        return locate_rows(self.sources, *self._mixture.locate(np.array(self.plan.positions(step))))

    def micro_batches(self, step: int) -> list[MaskedBatch]:
        """This rank's micro-batches of `step`, in order. CorruptShardError if a corrupt shard is not skipped."""
        return self._read(step, self.addresses(step))

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MaskedBatch]]:
        """The micro-batches of each step in [start_step, stop_step); a thread makes them `prefetch_steps` ahead.

        While a group of shards is read, the next one is opened.
        """
        stops = self._mixture.counts(stop_step).tolist()

        def make(step: int) -> list[MaskedBatch]:
            addresses = self.addresses(step)
            micro_batches = self._read(step, addresses)
            for place in np.unique(addresses.source).tolist():
                last = addresses.position[addresses.source == place][-1]
                self.sources[place].open_groups_ahead(int(last), stops[place])
            return micro_batches

        submitted = (self._thread.submit(make, step) for step in range(start_step, stop_step))
        coming = deque(islice(submitted, self.config.prefetch_steps))
        try:
            for _ in range(start_step, stop_step):
                coming.extend(islice(submitted, 1))
                started = time.perf_counter()
                micro_batches = coming.popleft().result()
                self.wait_seconds += time.perf_counter() - started
                yield micro_batches
        finally:
            for future in coming:
                future.cancel()

    def heldout_batches(self, num_rows: int) -> Iterator[MaskedBatch]:
        """This rank's share of the first `num_rows` held-out rows (or of all, if there are fewer), in micro-batches.

        They come from all sources that have held-out rows and last to the run's end, in the shares of their weights.
        Rows and masks are the same at every evaluation, for every seed and world size. Every rank has the same number
        of batches; the rows that fill up the last ones have all their labels IGNORED.
        """
        if not self._heldout:
            raise ShardError("the shards have no held-out rows: write them with tokenize_corpus.py --heldout-fraction")
        num_rows = min(num_rows, self.num_heldout_rows)
        with ExitStack() as stack:
            opened = [stack.enter_context(closing(HeldoutRows(source))) for source in self.sources]
            for positions in self.plan.heldout(num_rows):
                is_filler = positions >= num_rows
                positions[is_filler] = 0
                addresses = locate_rows(opened, *self._heldout.locate(positions))
                batch = self._masked(opened, addresses, self._num_masked.last)
                batch.labels_BM.numpy()[is_filler] = IGNORED
                yield batch

    def fingerprint(self) -> dict[str, Any]:
        """Facts of the data that a resumed run must find again."""
        return fingerprint(self.config, [source.manifest for source in self.sources], self.num_heldout_rows)

    def close(self) -> None:
        """Ends the threads behind `steps`."""
        self._thread.shutdown(cancel_futures=True)
        for source in self.sources:
            source.close()

    def _read(self, step: int, addresses: BatchAddresses) -> list[MaskedBatch]:
        batch = self._masked(self.sources, addresses, self._num_masked.at(step))
        return batch.split(self.plan.micro_batch_size)

    def _masked(self, sources: Sequence[RowSource], addresses: BatchAddresses, num_masked: int) -> MaskedBatch:
        """The rows at `addresses`, read from the sources and masked by their seeds."""
        batch = mask_rows(
            read_rows(sources, addresses),
            addresses.epoch,
            addresses.global_row_index,
            seed=np.array([source.seed for source in sources], np.uint64)[addresses.source],
            num_masked=num_masked,
            vocab_size=self.sources[0].manifest.vocab_size,
        )
        return replace(batch, padded=self.config.padded)
