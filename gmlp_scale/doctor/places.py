"""The folder for checkpoints, the shards and the loader, as this rank finds them. Nothing here needs another rank."""

import os
import shutil
import time
from pathlib import Path

from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import Shard, ShardError
from gmlp_scale.distributed.world import World
from gmlp_scale.plan.describe import short
from gmlp_scale.plan.layouts import checkpoint_bytes
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import delete_file, is_local, is_url, list_files, open_filesystem, read_file, write_file

WRITTEN_BYTES = 2**28
"""All ranks together write this much, to see how fast the folder takes it."""
UPLOADED_BYTES = 2**23
LOADING_SECONDS = 1.0
MOST_NAMED = 3


def make(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise _refused_by(folder.parent, error) from None


def _refused_by(folder: Path, error: OSError) -> OSError:
    return OSError(f"{folder} cannot be written to ({error.strerror}): set output_dir, or free room")


def place_of_checkpoints(run: RunConfig) -> Path:
    """The run's local folder or, as long as it is not there, the nearest one above it."""
    place = run.run_dir.absolute()
    while not place.exists():
        place = place.parent
    return place


def check_room(run: RunConfig, place: Path) -> str:
    """Raises OSError if the disk has no room for all checkpoints that it will have to hold at a time."""
    one_bytes, kept = checkpoint_bytes(run), run.checkpoint
    num_kept = 2 if is_url(run.output_dir) else kept.keep_last + 1
    if kept.keep_every_steps and not is_url(run.output_dir):
        num_kept += run.train.num_steps // kept.keep_every_steps
    there = sum(file.stat().st_size for file in (run.run_dir / "checkpoints").rglob("*") if file.is_file())
    needed, free = num_kept * one_bytes, shutil.disk_usage(place).free
    if needed - there > free:
        raise OSError(
            f"{place} has {short(free)}B free, but {num_kept} checkpoints of {short(one_bytes)}B will need "
            f"{short(needed)}B, of which {short(there)}B are there: free room, set output_dir to another disk, lower "
            "checkpoint.keep_last or raise checkpoint.keep_every_steps"
        )
    return f"{place}: {short(free)}B free, {num_kept} checkpoints need {short(needed)}B"


def write_into(folder: Path, world: World) -> float:
    """Writes this rank's part of WRITTEN_BYTES into rank 0's folder; returns the seconds.

    OSError if the folder refuses it, or is not there on this rank.
    """
    if not folder.exists():
        raise OSError(
            f"{folder.parent} is not the folder that rank 0 has: set output_dir to a folder on a filesystem that all "
            "hosts share, or to a URL"
        )
    content = os.urandom(2**20)
    started = time.perf_counter()
    try:
        with (folder / f"rank_{world.rank}").open("wb") as file:
            for _ in range(max(1, WRITTEN_BYTES // len(content) // world.size)):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _refused_by(folder.parent, error) from None
    return time.perf_counter() - started


def try_bucket(run: RunConfig) -> str:
    """Writes a file to the run folder's URL, reads it and deletes it. OSError if the store refuses."""
    url, content = f"{run.run_folder}/doctor", os.urandom(UPLOADED_BYTES)
    started = time.perf_counter()
    write_file(url, content)
    written = time.perf_counter()
    is_same = read_file(url) == content
    read = time.perf_counter()
    delete_file(url)
    if not is_same:
        raise OSError(f"{run.run_folder} gave other bytes back than were written: use another store")
    rates = [UPLOADED_BYTES / seconds / 1e6 for seconds in (written - started, read - written)]
    return f"{run.run_folder}: {rates[0]:.0f} MB/s written, {rates[1]:.0f} MB/s read"


def check_shards(run: RunConfig, loader: Loader, world: World) -> str:
    """Checks that all shards are where the manifest says, and verifies those of this rank's first and last step.

    Raises ShardError or OSError, which name the shards.
    """
    num_shards, opened = 0, set()
    for source in loader.sources:
        shards = [*source.manifest.splits.train, *source.manifest.splits.heldout]
        num_shards += len(shards)
        if world.local_rank == 0:
            _check_all_there(source.config.shards, shards)
    for step in (0, run.train.num_steps - 1):
        loader.micro_batches(step)
        addresses = loader.addresses(step)
        opened |= set(zip(addresses.source.tolist(), addresses.shard.tolist(), strict=True))
    next(loader.heldout_batches(run.train.num_evaluation_rows))
    rows = f"{loader.num_rows:,} training and {loader.num_heldout_rows:,} held-out rows"
    return f"{num_shards} shards, {rows}; {len(opened)} training shards verified by rank {world.rank}"


def _check_all_there(folder: str, shards: list[Shard]) -> None:
    if is_local(folder):
        root = open_filesystem(folder)[1]
        missing = [shard.name for shard in shards if not Path(root, shard.name).is_file()]
    else:
        there = set(list_files(folder))
        missing = [shard.name for shard in shards if shard.name not in there]
    if missing:
        names = ", ".join(missing[:MOST_NAMED]) + (", ..." if len(missing) > MOST_NAMED else "")
        raise ShardError(f"{folder} lacks {len(missing)} of {len(shards)} shards ({names}): copy or write them again")


def loaded_rows_per_second(loader: Loader, num_steps: int) -> float:
    """The rate of this rank's loader. Opening and verifying new shards counts."""
    num_rows, started = 0, time.perf_counter()
    for step in range(num_steps):
        num_rows += sum(len(batch.token_ids_BN) for batch in loader.micro_batches(step))
        if time.perf_counter() - started > LOADING_SECONDS:
            break
    return num_rows / (time.perf_counter() - started)
