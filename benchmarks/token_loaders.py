"""Other people's loaders of tokenized rows, and ours, each written and read as its own docs recommend.

Each has a function that writes rows (uint16 [R, N], in shards of `rows_per_shard`) into a new folder, and one that
opens them: (Reading, state or None) -> (this rank's shuffled batches, int64 [B, N], from that state on and without end;
a call that gives the state after the batches that were given out).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.loading import write_shards
from gmlp_scale.data.rows import RowLoader, Rows
from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config

RECIPE = Path(__file__).parents[1] / "configs/pretrain/gmlp_base.yaml"
SEED = 1

Opened = tuple[Iterator[Tensor], Callable[[], Any]]


@dataclass(frozen=True)
class Reading:
    """What is read, and how."""

    folder: Path
    batch_size: int
    """Rows of a step over all ranks."""
    sequence_length: int = 512
    rank: int = 0
    world_size: int = 1
    num_workers: int = 2
    """Processes of each rank; ours has a thread instead."""
    buffer: int | None = None
    """Rows of a shuffle buffer or block; None for the library's default."""
    is_checked: bool = False
    """Turn on what checks of the bytes the library has, if they are off by default."""

    @property
    def rank_rows(self) -> int:
        return self.batch_size // self.world_size


def endless(epoch: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from epoch


def long(rows: Any) -> Tensor:
    return torch.as_tensor(np.asarray(rows).astype(np.int64))


def stacked(rows: list[Any]) -> Tensor:
    return long(np.stack(rows))


def saved_parts(rows_RN: np.ndarray, rows_per_shard: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows_RN), rows_per_shard):
        yield rows_RN[start : start + rows_per_shard]


def recipe_of(sequence_length: int) -> RunConfig:
    return load_run_config(RECIPE, ["engine.kind=single", f"model.sequence_length={sequence_length}"])


def write_ours(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    write_shards(recipe_of(rows_RN.shape[1]), rows_RN, folder, rows_per_shard=rows_per_shard)


def gmlp_scale(how: Reading, state: Any) -> Opened:
    group = {"shuffle_group_bytes": how.buffer * how.sequence_length * ROW_DTYPE.itemsize} if how.buffer else {}
    rows = Rows(
        str(how.folder), seed=SEED, global_batch_size=how.batch_size, run_dir=how.folder, prefetch_steps=16, **group
    )
    loader = RowLoader(rows, rank=how.rank, world_size=how.world_size)
    if state:
        loader.load_state_dict(state)
    return (batch["input_ids"] for batch in loader), loader.state_dict


def webdataset(how: Reading, state: Any) -> Opened:
    """Our own shards, whose members are blocks of 256 rows: the smallest and fastest form that it can read.

    It has no state. A trainer can count the batches and, since `detshuffle` repeats its order, run through them again.
    """
    import webdataset as wds

    paths = sorted(str(path) for path in how.folder.glob("train/*.tar"))
    options = {"shardshuffle": len(paths), "detshuffle": True, "seed": SEED, "empty_check": False}
    blocks = wds.WebDataset(paths, nodesplitter=wds.split_by_node, **options).decode().to_tuple("npy")
    rows = blocks.compose(_rows_of_blocks, wds.detshuffle(how.buffer or 1000, seed=SEED))
    data = rows.batched(how.rank_rows, collation_fn=stacked, partial=False)
    batches = endless(wds.WebLoader(data, batch_size=None, num_workers=how.num_workers))
    return _counted(islice(batches, state or 0, None), state or 0)


def _rows_of_blocks(blocks: Iterator[tuple[np.ndarray]]) -> Iterator[np.ndarray]:
    return (row for (block,) in blocks for row in block)


def _counted(batches: Iterator[Tensor], start: int) -> Opened:
    given = start

    def counting() -> Iterator[Tensor]:
        nonlocal given
        for batch in batches:
            given += 1
            yield batch

    return counting(), lambda: given


def write_streaming(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from streaming import MDSWriter

    columns, num_bytes = {"tokens": f"ndarray:uint16:{rows_RN.shape[1]}"}, rows_RN[0].nbytes + 4
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=rows_per_shard * num_bytes) as writer:
        for row in rows_RN:
            writer.write({"tokens": row})


def streaming(how: Reading, state: Any) -> Opened:
    """It checks hashes of what it downloads, if asked to; so with `is_checked` it copies the folder."""
    from streaming import StreamingDataLoader, StreamingDataset

    places = {"local": str(how.folder)}
    if how.is_checked:
        places = {"remote": str(how.folder), "local": f"{how.folder}-local", "validate_hash": "xxh64"}
    data = StreamingDataset(
        **places,
        batch_size=how.rank_rows,
        shuffle=True,
        shuffle_seed=SEED,
        **({"shuffle_block_size": how.buffer} if how.buffer else {}),
    )
    loader = StreamingDataLoader(
        data, batch_size=how.rank_rows, num_workers=how.num_workers, collate_fn=_stacked_samples, drop_last=True
    )
    if state:
        loader.load_state_dict(state)
    return endless(loader), loader.state_dict


def _stacked_samples(samples: list[dict[str, np.ndarray]]) -> Tensor:
    return stacked([sample["tokens"] for sample in samples])


def write_litdata(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from litdata import TokensLoader, optimize

    np.save(path := f"{folder}.npy", rows_RN)
    starts = list(range(0, len(rows_RN), rows_per_shard))
    optimize(
        partial(_tokens, path, rows_per_shard),
        starts,
        str(folder),
        chunk_size=rows_per_shard * rows_RN.shape[1],
        item_loader=TokensLoader(block_size=rows_RN.shape[1]),
        num_workers=1,
    )
    os.unlink(path)


def _tokens(path: str, num_rows: int, start: int) -> Iterator[Tensor]:
    for row in np.load(path, mmap_mode="r")[start : start + num_rows]:
        yield torch.from_numpy(row.copy())


def litdata(how: Reading, state: Any) -> Opened:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    window = {"item_shuffle_window": how.buffer} if how.buffer else {}
    loader_of_items = TokensLoader(block_size=how.sequence_length)
    data = StreamingDataset(
        str(how.folder), item_loader=loader_of_items, shuffle=True, drop_last=True, seed=SEED, **window
    )
    loader = StreamingDataLoader(data, batch_size=how.rank_rows, num_workers=how.num_workers)
    if state:
        loader.load_state_dict(state)
    return map(long, endless(loader)), loader.state_dict


def write_grain(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    folder.mkdir(parents=True)
    for number, part in enumerate(saved_parts(rows_RN, rows_per_shard)):
        writer = ArrayRecordWriter(f"{folder}/{number:05d}.array_record", "group_size:1")
        for row in part:
            writer.write(row.tobytes())
        writer.close()


def grain(how: Reading, state: Any) -> Opened:
    """Its Dataset API, as its docs recommend. `group_size:1` is what they say for random access."""
    import grain

    source = grain.sources.ArrayRecordDataSource(sorted(map(str, how.folder.glob("*.array_record"))))
    rows = grain.MapDataset.source(source).seed(SEED)
    rows = rows.shuffle() if not how.buffer else rows.window_shuffle(how.buffer)
    batches = rows.repeat()[how.rank :: how.world_size].map(_from_bytes).batch(how.rank_rows)
    batches = batches.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=16))  # its default is 500
    if how.num_workers:
        batches = batches.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=how.num_workers))
    iterator = iter(batches)
    if state:
        iterator.set_state(state)
    return map(torch.from_numpy, iterator), iterator.get_state


def _from_bytes(record: bytes) -> np.ndarray:
    return np.frombuffer(record, ROW_DTYPE).astype(np.int64)


def write_datasets(rows_RN: np.ndarray, folder: Path, rows_per_shard: int) -> None:
    import datasets
    import pyarrow

    tokens = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows_RN.reshape(-1)), rows_RN.shape[1])
    data = datasets.Dataset(pyarrow.table({"tokens": tokens}))
    data.save_to_disk(str(folder), num_shards=-(-len(rows_RN) // rows_per_shard))


def torchdata(how: Reading, state: Any) -> Opened:
    """StatefulDataLoader and its sampler over a data set of `datasets`, a map of Arrow files."""
    import datasets
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = datasets.load_from_disk(str(how.folder)).with_format("numpy")
    sampler = StatefulDistributedSampler(data, how.world_size, how.rank, shuffle=True, seed=SEED, drop_last=True)
    loader = StatefulDataLoader(
        data, how.rank_rows, sampler=sampler, num_workers=how.num_workers, collate_fn=_stacked_samples, drop_last=True
    )
    if state:
        loader.load_state_dict(state)
    return endless(loader), loader.state_dict


def datasets_streamed(how: Reading, state: Any) -> Opened:
    """The same through an IterableDataset with a shuffle buffer, as for data that is streamed."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    stored = datasets.load_from_disk(str(how.folder))
    data = stored.to_iterable_dataset(num_shards=max(8, len(stored.cache_files))).with_format("numpy")
    data = split_dataset_by_node(data.shuffle(seed=SEED, buffer_size=how.buffer or 1000), how.rank, how.world_size)
    loader = StatefulDataLoader(
        data, how.rank_rows, num_workers=how.num_workers, collate_fn=_stacked_samples, drop_last=True
    )
    if state:
        loader.load_state_dict(state)
    return endless(loader), loader.state_dict


LOADERS = {
    "gmlp_scale": (write_ours, gmlp_scale),
    "webdataset": (write_ours, webdataset),
    "mosaicml-streaming": (write_streaming, streaming),
    "litdata": (write_litdata, litdata),
    "grain": (write_grain, grain),
    "torchdata, datasets": (write_datasets, torchdata),
    "torchdata, datasets streamed": (write_datasets, datasets_streamed),
}
