"""Other people's loaders of tokenized rows, and ours, each written and read as its own docs recommend.

Each has a function that writes rows (uint16 [R, N], in shards of `rows_per_shard`) into a new folder, and one that
opens them: (Reading, state or None) -> (this rank's shuffled batches, int64 [B, N], from that state on and without end;
a call that gives the state after the batches that were given out).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.loading import write_shards
from gmlp_scale.data.rows import RowLoader, Rows
from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.recipe.reader import load_run_config

SEED = 1
Opened = tuple[Iterator[Tensor], Callable[[], Any]]


@dataclass(frozen=True)
class Reading:
    folder: Path
    batch_size: int
    """Rows of a step over all ranks."""
    sequence_length: int
    workers: int
    rank: int = 0
    world_size: int = 1
    meeting: Path | None = None
    """The file by which several ranks meet."""
    buffer: int | None = None
    """Rows of a shuffle buffer or block; None for the library's default."""

    @property
    def rank_rows(self) -> int:
        return self.batch_size // self.world_size


def endless(epoch: Iterable[Tensor]) -> Iterator[Tensor]:
    return chain.from_iterable(repeat(epoch))


def stacked(samples: list[dict[str, np.ndarray]]) -> Tensor:
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def write_ours(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    run = load_run_config("gmlp_base", ["engine.kind=single", f"model.sequence_length={rows_RN.shape[1]}"])
    write_shards(run, rows_RN, folder, rows_per_shard=rows_per_shard)


def gmlp_scale(how: Reading, state: Any) -> Opened:
    size = {"shuffle_group_bytes": how.buffer * how.sequence_length * ROW_DTYPE.itemsize} if how.buffer else {}
    options = {"seed": SEED, "run_dir": how.folder, "prefetch_steps": 16}
    rows = Rows(str(how.folder), global_batch_size=how.batch_size, **options, **size)
    loader = RowLoader(rows, rank=how.rank, world_size=how.world_size)
    if state:
        loader.load_state_dict(state)
    return (batch["input_ids"] for batch in loader), loader.state_dict


def webdataset(how: Reading, state: Any) -> Opened:
    """Our own shards, whose members are blocks of 256 rows: the smallest and fastest form that it can read.

    It has no state. A trainer can count the batches and, since `detshuffle` repeats its order, run through them again.
    """
    import webdataset as wds

    paths = sorted(map(str, how.folder.glob("train/*.tar")))
    options = {"shardshuffle": len(paths), "detshuffle": True, "seed": SEED, "empty_check": False}
    blocks = wds.WebDataset(paths, nodesplitter=wds.split_by_node, **options).decode().to_tuple("npy")
    rows = blocks.compose(lambda blocks: ({"tokens": row} for (block,) in blocks for row in block))
    data = rows.compose(wds.detshuffle(how.buffer or 1000, seed=SEED))
    data = data.batched(how.rank_rows, collation_fn=stacked, partial=False)
    loader = wds.WebLoader(data, batch_size=None, num_workers=how.workers)
    num_given = state or 0

    def counted() -> Iterator[Tensor]:
        nonlocal num_given
        for batch in islice(endless(loader), num_given, None):
            num_given += 1
            yield batch

    return counted(), lambda: num_given


def write_streaming(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from streaming import MDSWriter

    columns, num_bytes = {"tokens": f"ndarray:uint16:{rows_RN.shape[1]}"}, rows_RN[0].nbytes + 4
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=rows_per_shard * num_bytes) as writer:
        for row in rows_RN:
            writer.write({"tokens": row})


def streaming(how: Reading, state: Any) -> Opened:
    from streaming import StreamingDataLoader, StreamingDataset

    block = {"shuffle_block_size": how.buffer} if how.buffer else {}
    data = StreamingDataset(local=str(how.folder), batch_size=how.rank_rows, shuffle=True, shuffle_seed=SEED, **block)
    options = {"num_workers": how.workers, "collate_fn": stacked, "drop_last": True}
    loader = StreamingDataLoader(data, batch_size=how.rank_rows, **options)
    if state:
        loader.load_state_dict(state)
    return endless(loader), loader.state_dict


def write_litdata(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from litdata import TokensLoader, optimize

    length = rows_RN.shape[1]
    parts = [rows_RN[start : start + rows_per_shard] for start in range(0, len(rows_RN), rows_per_shard)]
    loader, size = TokensLoader(block_size=length), rows_per_shard * length
    optimize(_tokens, parts, str(folder), chunk_size=size, item_loader=loader, num_workers=1)


def _tokens(rows: np.ndarray) -> Iterator[Tensor]:
    for row in rows:
        yield torch.from_numpy(row.copy())


def litdata(how: Reading, state: Any) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    window = {"item_shuffle_window": how.buffer} if how.buffer else {}
    item_loader = TokensLoader(block_size=how.sequence_length)
    data = StreamingDataset(str(how.folder), item_loader=item_loader, shuffle=True, drop_last=True, seed=SEED, **window)
    loader = StreamingDataLoader(data, batch_size=how.rank_rows, num_workers=how.workers)
    if state:
        loader.load_state_dict(state)
    return map(Tensor.long, endless(loader)), loader.state_dict


def write_grain(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True)
    for start in range(0, len(rows_RN), rows_per_shard):
        writer = ArrayRecordWriter(f"{folder}/{start:08d}.array_record", "group_size:1")
        for row in rows_RN[start : start + rows_per_shard]:
            writer.write(row.tobytes())
        writer.close()


def grain(how: Reading, state: Any) -> Opened:
    """Its Dataset API, as its docs recommend. `group_size:1` is what they say for random access."""
    import grain

    source = grain.sources.ArrayRecordDataSource(sorted(map(str, how.folder.glob("*.array_record"))))
    rows = grain.MapDataset.source(source).seed(SEED).shuffle().repeat()
    rows = rows[how.rank :: how.world_size].map(lambda record: np.frombuffer(record, ROW_DTYPE).astype(np.int64))
    options = grain.ReadOptions(num_threads=16, prefetch_buffer_size=16)  # its default is 500
    batches = rows.batch(how.rank_rows).to_iter_dataset(options)
    if how.workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=how.workers))
    iterator = iter(batches)
    if state:
        iterator.set_state(state)
    return map(torch.from_numpy, iterator), iterator.get_state


def write_datasets(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    import datasets
    import pyarrow

    tokens = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows_RN.reshape(-1)), rows_RN.shape[1])
    num_shards = -(-len(rows_RN) // rows_per_shard)
    datasets.Dataset(pyarrow.table({"tokens": tokens})).save_to_disk(str(folder), num_shards=num_shards)


def torchdata(how: Reading, state: Any) -> Opened:
    """StatefulDataLoader and its sampler over a data set of `datasets`, a map of Arrow files."""
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = datasets.load_from_disk(str(how.folder)).with_format("numpy")
    order = StatefulDistributedSampler(data, how.world_size, how.rank, shuffle=True, seed=SEED, drop_last=True)
    options = {"num_workers": how.workers, "collate_fn": stacked, "drop_last": True}
    loader = StatefulDataLoader(data, how.rank_rows, sampler=order, **options)
    if state:
        loader.load_state_dict(state)
    return endless(loader), loader.state_dict


@dataclass(frozen=True)
class Library:
    write: Callable[[np.ndarray, Path, int], None]
    opened: Callable[[Reading, Any], Opened]
    packages: tuple[str, ...] = ()
    num_workers: tuple[int, ...] = (2, 0)
    """Of a rank. The first is for all parts, 0 where the library has threads of its own; `rates` take each."""
    buffer: int | None = None
    """Rows of another shuffle buffer or block than the default, where there is one: for litdata a whole chunk."""


LOADERS = {
    "gmlp_scale": Library(write_ours, gmlp_scale, num_workers=(0,), buffer=2**16),
    "mosaicml-streaming": Library(write_streaming, streaming, ("mosaicml-streaming",), buffer=2**16),
    "litdata": Library(write_litdata, litdata, ("litdata",), buffer=2**13),
    "grain": Library(write_grain, grain, ("grain",), num_workers=(0, 2)),
    "webdataset": Library(write_ours, webdataset, ("webdataset",), buffer=10_000),
    "torchdata over datasets": Library(write_datasets, torchdata, ("torchdata", "datasets")),
}
