"""Times the loader beside webdataset on the same shuffled rows, and its first batch far into a large data set.

A rate is rows per second of CPU time of the whole process: a loader's own threads count, and other programs on the
machine matter less. webdataset does not mask its rows, so our loader is also measured without masks.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from benchmarks.timing import Contender, Turn, say, time_in_turns
from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS
from gmlp_scale.data.hashing import hash64
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import MANIFEST_NAME, Shard, ShardFiles, Splits
from gmlp_scale.data.shards import ROW_DTYPE, Manifest, ShardWriter
from gmlp_scale.data.source import OpenShards
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import write_text
from gmlp_scale.tasks.pretraining import build_loader

ROWS_PER_BATCH = 256
NUM_ROWS = 2**15
BATCHES_PER_TURN = 32
SHUFFLED_AMONG = 10_000  # rows in webdataset's shuffle buffer

C4_SHARDS, C4_ROWS_PER_SHARD = 40_000, 7_625  # 305 M rows of 512
FAR_STEP = 1_000_000


def measure_loading(run: RunConfig, num_rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        rates = rows_per_core_second(run, num_rounds, Path(folder))
        far_seconds = first_batch_seconds(run, Path(folder) / "c4")
    return {
        "rows_per_core_second": rates,
        "first_batch": {"step": FAR_STEP, "rows": C4_SHARDS * C4_ROWS_PER_SHARD, **far_seconds},
        "ratios": {
            "over_webdataset": rates["gmlp_scale_unmasked"] / rates["webdataset"],
            "masked_over_webdataset": rates["gmlp_scale"] / rates["webdataset"],
        },
    }


def rows_per_core_second(run: RunConfig, num_rounds: int, folder: Path) -> dict[str, float]:
    """Each loader's rate, by the loader's name. Each has its own process, so none pays for another's threads."""
    write_shards(run, random_rows(run, NUM_ROWS), folder / "shards")
    turns = {name: Contender(name, prepare_loader, name, run, folder / "shards").take_turn for name in LOADERS}
    seconds = time_in_turns(turns, num_rounds)
    return {name: BATCHES_PER_TURN * ROWS_PER_BATCH / spent for name, spent in seconds.items()}


def prepare_loader(name: str, run: RunConfig, shards: Path) -> tuple[Turn, dict]:
    """A turn that returns CPU seconds."""
    batches = LOADERS[name](run, shards)

    def turn(num_batches: int = BATCHES_PER_TURN) -> float:
        started = time.process_time()
        for _ in range(num_batches):
            next(batches)
        return time.process_time() - started

    turn(NUM_ROWS // ROWS_PER_BATCH)  # an epoch: every shard is opened, verified and in memory
    return turn, {}


def random_rows(run: RunConfig, num_rows: int) -> np.ndarray:
    shape = (num_rows, run.model.sequence_length)
    return np.random.default_rng(0).integers(NUM_SPECIAL_TOKENS, run.model.vocab_size, shape).astype(ROW_DTYPE)


def write_shards(
    run: RunConfig, rows_RN: np.ndarray, folder: Path, num_heldout: int = 0, rows_per_shard: int = 2**13
) -> None:
    """The first `num_heldout` rows are the held-out ones, and the others the training rows."""
    shards = []
    for split, rows in (("train", rows_RN[num_heldout:]), ("heldout", rows_RN[:num_heldout])):
        writer = ShardWriter(
            folder, split, f"{split}-00000", sequence_length=rows.shape[1], rows_per_shard=rows_per_shard
        )
        writer.add(rows)
        shards.append(writer.close())
    write_manifest(run, shards[0], folder, heldout=shards[1])


def write_manifest(run: RunConfig, train: Sequence[Shard], folder: Path, heldout: Sequence[Shard] = ()) -> None:
    splits = Splits(train=tuple(train), heldout=tuple(heldout))
    manifest = Manifest(
        sequence_length=run.model.sequence_length,
        vocab_size=run.model.vocab_size,
        packing=run.data.packing,
        tokenizer_sha256="0" * 64,
        total_rows=splits.total_rows,
        splits=splits,
    )
    write_text(f"{folder}/{MANIFEST_NAME}", manifest.to_json())


def loader_of(run: RunConfig, shards: Path) -> Loader:
    """The run's loader, on these shards and with batches of ROWS_PER_BATCH."""
    data = run.data.model_copy(update={"shards": str(shards), "cache_dir": None})
    here = run.with_train(global_batch_size=ROWS_PER_BATCH, micro_batch_size=ROWS_PER_BATCH)
    return build_loader(here.model_copy(update={"data": data, "output_dir": str(shards)}), rank=0, world_size=1)


def c4_shards(run: RunConfig) -> list[Shard]:
    """A manifest's entries for as many shards as C4 has, which nobody has written."""
    return [
        Shard(
            name=f"train/train-{number:05d}-000000.tar",
            rows=C4_ROWS_PER_SHARD,
            bytes=C4_ROWS_PER_SHARD * run.model.sequence_length * ROW_DTYPE.itemsize,
            sha256="".join(f"{word:016x}" for word in hash64(number, np.arange(4))),
        )
        for number in range(C4_SHARDS)
    ]


def first_batch_seconds(run: RunConfig, folder: Path) -> dict[str, float]:
    """The time from reading the manifest to having the masked batch of step FAR_STEP, in a data set of C4's size.

    Only the shards that this step reads are written; the manifest lists all of them.
    """
    say("first batch of a far step")
    length = run.model.sequence_length
    shards = c4_shards(run)
    write_manifest(run, shards, folder)
    loader = loader_of(run, folder)
    rows_RN = random_rows(run, C4_ROWS_PER_SHARD)
    for number in sorted({int(shard) for shard in loader.addresses(FAR_STEP).shard}):
        stem = f"train-{number:05d}"
        writer = ShardWriter(folder, "train", stem, sequence_length=length, rows_per_shard=C4_ROWS_PER_SHARD)
        writer.add(rows_RN)
        (shards[number],) = writer.close()
    loader.close()
    write_manifest(run, shards, folder)

    started, cpu_started = time.perf_counter(), time.process_time()
    loader = loader_of(run, folder)
    loader.micro_batches(FAR_STEP)
    seconds = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    loader.close()
    return seconds


def gmlp_scale(run: RunConfig, shards: Path) -> Iterator:
    return map(loader_of(run, shards).micro_batches, cycle(range(NUM_ROWS // ROWS_PER_BATCH)))


def gmlp_scale_unmasked(run: RunConfig, shards: Path) -> Iterator:
    """The same rows without masks, as webdataset gives them."""
    loader, files = loader_of(run, shards), ShardFiles(str(shards), None, max_bytes=run.data.cache_max_bytes)
    manifest = loader.sources[0].manifest
    opened = OpenShards(files, manifest, "train", num_open=len(manifest.splits.train), skip_corrupt=None)
    addresses = map(loader.addresses, cycle(range(NUM_ROWS // ROWS_PER_BATCH)))
    return (opened.read(some.shard, some.row_index) for some in addresses)


def webdataset(run: RunConfig, shards: Path) -> Iterator:
    """Our own shards, whose members are blocks of 256 rows, through a buffer that shuffles rows."""
    import webdataset

    paths = [str(path) for path in sorted(shards.glob("train/*.tar"))]
    blocks = webdataset.WebDataset(paths, shardshuffle=100, empty_check=False).repeat().decode().to_tuple("npy")
    rows = blocks.compose(lambda blocks: (row for (block,) in blocks for row in block)).shuffle(SHUFFLED_AMONG)
    return batched(iter(rows))


LOADERS = {"gmlp_scale": gmlp_scale, "gmlp_scale_unmasked": gmlp_scale_unmasked, "webdataset": webdataset}
"""Each (run, shards) -> batches of ROWS_PER_BATCH shuffled rows, without end."""


def batched(rows: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    while True:
        yield np.stack([next(rows) for _ in range(ROWS_PER_BATCH)])
