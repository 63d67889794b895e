"""The loader beside others that read the same shuffled rows, and its first batch far into a large data set.

Rows are counted per second of CPU time of the whole process, so that a loader's own threads are counted too, and that
nothing else on the machine matters as much. The others' rows come without masks, so ours are counted so too.
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path

import numpy as np

from gmlp_scale.benchmark.contender import Contender, Turn
from gmlp_scale.benchmark.timing import medians, say, time_in_turns
from gmlp_scale.config import RunConfig
from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS
from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.hashing import hash64
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.open_shards import OpenShards
from gmlp_scale.data.shards import MANIFEST_NAME, ROW_DTYPE, Manifest, Shard, ShardRows, ShardWriter, Splits, write_file
from gmlp_scale.run import build_loader

ROWS_PER_BATCH = 256
NUM_ROWS = 2**15
BATCHES_PER_TURN = 32
SHUFFLED_AMONG = 10_000  # rows in the buffers of loaders that shuffle by one
H200_ROWS_PER_SECOND = 1130
"""Rows of 512 tokens that one H200 training gmlp_base eats: 131,072 tokens in 227 ms, the fastest step thought possible
there. Each rank has a loader of its own."""

C4_SHARDS, C4_ROWS_PER_SHARD = 40_000, 7_625  # 305 M rows of 512
FAR_STEP = 1_000_000


def measure_loading(run: RunConfig, num_rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        rates, missing = rows_per_core_second(run, num_rounds, Path(folder))
        far_seconds = first_batch_seconds(run, Path(folder) / "c4")
    ours = rates["gmlp_scale"]
    return {
        "rows_per_core_second": rates | missing,
        "first_batch": {"step": FAR_STEP, "rows": C4_SHARDS * C4_ROWS_PER_SHARD, **far_seconds},
        "loader_cores_per_h200": H200_ROWS_PER_SECOND / ours,  # not a wait: the loader works beside the training
        "ratios": {f"over_{name}": rates["gmlp_scale_unmasked"] / rates[name] for name in PEERS if name in rates}
        | {f"masked_over_{name}": ours / rates[name] for name in PEERS if name in rates},
    }


def rows_per_core_second(run: RunConfig, num_rounds: int, folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    """By name; and why others were not measured. Each has a process of its own, since some leave threads at work."""
    length, vocab_size = run.model.sequence_length, run.model.vocab_size
    rows_RN = np.random.default_rng(0).integers(NUM_SPECIAL_TOKENS, vocab_size, (NUM_ROWS, length)).astype(ROW_DTYPE)
    write_shards(run, rows_RN, folder / "shards")
    turns, missing = {}, {}
    for name in LOADERS:
        say(f"rows for {name}")
        try:
            turns[name] = Contender(name, prepare_loader, name, run, folder).take_turn
        except ImportError as error:
            missing[name] = str(error)
    seconds = medians(time_in_turns(turns, num_rounds))
    return {name: BATCHES_PER_TURN * ROWS_PER_BATCH / spent for name, spent in seconds.items()}, missing


def prepare_loader(name: str, run: RunConfig, folder: Path) -> tuple[Turn, dict]:
    """Its turns are of CPU seconds."""
    batches = LOADERS[name](run, folder / "shards", folder / name)
    take(batches, NUM_ROWS // ROWS_PER_BATCH)  # an epoch: every shard is opened, verified and in memory
    return partial(take, batches, BATCHES_PER_TURN), {}


def take(batches: Iterator, num_batches: int) -> float:
    """The CPU seconds that they took."""
    started = time.process_time()
    for _ in range(num_batches):
        next(batches)
    return time.process_time() - started


def write_shards(run: RunConfig, rows_RN: np.ndarray, folder: Path) -> None:
    writer = ShardWriter(folder, "train", "train-00000", sequence_length=rows_RN.shape[1], rows_per_shard=2**13)
    writer.add(rows_RN)
    write_manifest(run, tuple(writer.close()), folder)


def write_manifest(run: RunConfig, shards: tuple[Shard, ...], folder: Path) -> None:
    manifest = Manifest(
        sequence_length=run.model.sequence_length,
        vocab_size=run.model.vocab_size,
        packing=run.data.packing,
        tokenizer_sha256="0" * 64,
        total_rows={"train": sum(shard.rows for shard in shards), "heldout": 0},
        splits=Splits(train=shards, heldout=()),
    )
    write_file(f"{folder}/{MANIFEST_NAME}", manifest.to_json().encode())


def loader_of(run: RunConfig, shards: Path) -> Loader:
    """The run's, of the rows in `shards` and with batches of ROWS_PER_BATCH."""
    data = run.data.model_copy(update={"shards": str(shards), "cache_dir": None})
    sizes = {"global_batch_size": ROWS_PER_BATCH, "micro_batch_size": ROWS_PER_BATCH}
    train = run.train.model_copy(update=sizes)
    here = run.model_copy(update={"data": data, "train": train, "output_dir": shards})
    return build_loader(here, rank=0, world_size=1)


def first_batch_seconds(run: RunConfig, folder: Path) -> dict[str, float]:
    """From nothing to the batch of step 1,000,000 of a data set of C4's size, of which only that step's shards are
    written: reading the manifest, finding the rows, opening and verifying their shards, masking."""
    say("first batch of a far step")
    length, vocab_size = run.model.sequence_length, run.model.vocab_size
    absent = [
        Shard(
            name=f"train/train-{number:05d}-000000.tar",
            rows=C4_ROWS_PER_SHARD,
            bytes=C4_ROWS_PER_SHARD * length * ROW_DTYPE.itemsize,
            sha256="".join(f"{word:016x}" for word in hash64(number, np.arange(4))),
        )
        for number in range(C4_SHARDS)
    ]
    write_manifest(run, tuple(absent), folder)
    loader = loader_of(run, folder)
    rows_RN = np.random.default_rng(0).integers(NUM_SPECIAL_TOKENS, vocab_size, (C4_ROWS_PER_SHARD, length))
    for number in sorted({int(shard) for shard in loader.addresses(FAR_STEP).shard}):
        stem = f"train-{number:05d}"
        writer = ShardWriter(folder, "train", stem, sequence_length=length, rows_per_shard=C4_ROWS_PER_SHARD)
        writer.add(rows_RN.astype(ROW_DTYPE))
        (absent[number],) = writer.close()
    loader.close()
    write_manifest(run, tuple(absent), folder)

    started, cpu_started = time.perf_counter(), time.process_time()
    loader = loader_of(run, folder)
    loader.micro_batches(FAR_STEP)
    seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    loader.close()
    return seconds


def gmlp_scale(run: RunConfig, shards: Path, folder: Path) -> Iterator:
    return map(loader_of(run, shards).micro_batches, cycle(range(NUM_ROWS // ROWS_PER_BATCH)))


def gmlp_scale_unmasked(run: RunConfig, shards: Path, folder: Path) -> Iterator:
    """The same rows without masks, which is what the others give."""
    loader = loader_of(run, shards)
    train = loader.manifest.splits.train
    opened = OpenShards(
        ShardFiles(str(shards), None, max_bytes=run.data.cache_max_bytes),
        train,
        run.model.sequence_length,
        num_open=len(train),
        skip_corrupt=None,
    )
    addresses = map(loader.addresses, cycle(range(NUM_ROWS // ROWS_PER_BATCH)))
    return (opened.read(some.shard, some.row_index) for some in addresses)


def webdataset(run: RunConfig, shards: Path, folder: Path) -> Iterator:
    """Our own shards, whose entries are blocks of 256 rows, through a buffer that shuffles rows."""
    import webdataset

    blocks = webdataset.WebDataset(
        [str(path) for path in sorted(shards.glob("train/*.tar"))], shardshuffle=100, empty_check=False
    )
    rows = (
        blocks.repeat().decode().to_tuple("npy").compose(lambda blocks: (row for (block,) in blocks for row in block))
    )
    return batched(iter(rows.shuffle(SHUFFLED_AMONG)))


def litdata(run: RunConfig, shards: Path, folder: Path) -> Iterator:
    from litdata import StreamingDataset
    from litdata.streaming.cache import Cache

    cache = Cache(str(folder), chunk_bytes="8MB")
    for number, row in enumerate(rows_of(run, shards)):
        cache[number] = row
    cache.done()
    cache.merge()
    return batched(chain.from_iterable(repeat(StreamingDataset(str(folder), shuffle=True))))


def streaming(run: RunConfig, shards: Path, folder: Path) -> Iterator:
    """mosaicml-streaming."""
    from streaming import MDSWriter, StreamingDataset

    columns = {"row": f"ndarray:uint16:{run.model.sequence_length}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=2**23) as writer:
        for row in rows_of(run, shards):
            writer.write({"row": row})
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=ROWS_PER_BATCH)
    return batched(sample["row"] for sample in chain.from_iterable(repeat(dataset)))


PEERS = {"webdataset": webdataset, "litdata": litdata, "streaming": streaming}
LOADERS = {"gmlp_scale": gmlp_scale, "gmlp_scale_unmasked": gmlp_scale_unmasked} | PEERS
"""Each (run, our shards, a folder of its own) -> batches of ROWS_PER_BATCH shuffled rows, without end."""


def rows_of(run: RunConfig, shards: Path) -> Iterator[np.ndarray]:
    for shard in Manifest.load(shards).splits.train:
        yield from ShardRows(shards / shard.name, shard, run.model.sequence_length).read(np.arange(shard.rows))


def batched(rows: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    while True:
        yield np.stack([next(rows) for _ in range(ROWS_PER_BATCH)])
