"""The batches of pretraining: for each step the rank's rows, masked, made some steps ahead by a thread."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gmlp_scale.data.batch import IGNORED, MaskedBatch, num_masked_positions
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, fingerprint
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.masking import mask_rows
from gmlp_scale.data.mixture import Mixture, Pattern
from gmlp_scale.data.shards import Manifest
from gmlp_scale.data.source import BatchAddresses, HeldoutRows, RowSource, Source, locate_rows, read_rows

T = TypeVar("T")


class Loader:
    """The batches of a run for one rank, as its plan says.

    The rows of a mixture stand in the batch in the order of its pattern, so every micro-batch has nearly the shares of
    the whole batch. Which rows of a source come next is shuffled.

    manifests: those of the config's sources, checked.
    run_dir: where the corrupt shards that were skipped are recorded.
    """

    def __init__(self, config: DataConfig, plan: BatchPlan, manifests: Sequence[Manifest], *, run_dir: Path):
        self.config, self.plan = config, plan
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self.num_masked = config.masked_fractions.map(partial(num_masked_positions, manifests[0].sequence_length))
        self.mixture = Mixture(config.sources, plan.batch_sizes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.sources = [
            Source(config, place, manifest, seed=plan.seed, run_dir=run_dir) for place, manifest in enumerate(manifests)
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
        names = [f"/{source.config.name}" for source in self.sources] if self.config.is_mixture else [""]
        counts = self.mixture.counts(step).tolist()
        sources = zip(names, counts, self.sources, strict=True)
        return {f"data/epoch{name}": count / source.num_rows for name, count, source in sources}

    def addresses(self, step: int) -> BatchAddresses:
        """Where the rows that this rank takes at `step` are stored."""
        return locate_rows(self.sources, *self.mixture.locate(np.array(self.plan.positions(step))))

    def micro_batches(self, step: int, addresses: BatchAddresses | None = None) -> list[MaskedBatch]:
        """This rank's micro-batches of `step`, in order. CorruptShardError if a corrupt shard is not skipped."""
        batch = self.masked(self.sources, addresses or self.addresses(step), self.num_masked.at(step))
        return batch.split(self.plan.micro_batch_size)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[MaskedBatch]]:
        """The micro-batches of each step in [start_step, stop_step)."""
        return self.read_ahead(self.micro_batches, start_step, stop_step)

    def read_ahead(self, read: Callable[[int, BatchAddresses], T], start_step: int, stop_step: int) -> Iterator[T]:
        """read(step, addresses) of each step in [start_step, stop_step); a thread calls it `prefetch_steps` ahead.

        While a group of shards is read, the next one is opened.
        """
        stops = self.mixture.counts(stop_step).tolist()

        def make(step: int) -> T:
            addresses = self.addresses(step)
            made = read(step, addresses)
            for place in np.unique(addresses.source).tolist():
                last = addresses.position[addresses.source == place][-1]
                self.sources[place].open_groups_ahead(int(last), stops[place])
            return made

        submitted = (self._thread.submit(make, step) for step in range(start_step, stop_step))
        coming = deque(islice(submitted, self.config.prefetch_steps))
        try:
            for _ in range(start_step, stop_step):
                coming.extend(islice(submitted, 1))
                started = time.perf_counter()
                made = coming.popleft().result()
                self.wait_seconds += time.perf_counter() - started
                yield made
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
                batch = self.masked(opened, addresses, self.num_masked.last)
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

    def masked(self, sources: Sequence[RowSource], addresses: BatchAddresses, num_masked: int) -> MaskedBatch:
        """The rows at `addresses`, read from the sources and masked by their seeds."""
        batch = mask_rows(
            read_rows(sources, addresses),
            addresses.epoch,
            addresses.global_row_index,
            seed=np.array([source.seed for source in sources], np.uint64)[addresses.source],
            num_masked=num_masked,
            vocab_size=self.sources[0].manifest.vocab_size,
            special=self.sources[0].manifest.special,
        )
        return replace(batch, padded=self.config.padded)
