"""What a checkup measures on this rank's disk, shards and loader, and with the engine on all ranks together."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import Shard, ShardError
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import SingleConfig
from gmlp_scale.errors import UserError
from gmlp_scale.plan.describe import short
from gmlp_scale.plan.layouts import checkpoint_bytes
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import delete_file, is_url, list_files, read_file, write_file
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.metrics import peak_memory_bytes
from gmlp_scale.train.run import build_engine_of
from gmlp_scale.train.schedule import learning_rate
from gmlp_scale.train.trial import forget_other_recipes, random_batch

WRITTEN_BYTES = 2**28
"""All ranks together write this much, to see how fast the folder takes it."""
UPLOADED_BYTES = 2**23
LOADING_SECONDS = 1.0
MOST_NAMED = 3
NUM_BLOCKS = 2
NUM_STEPS = 3
SELF_TEST_RATE = 1e-3
MOST_ROWS = 32
"""Of all ranks' self-test micro-batches together; one for each rank if there are more ranks."""
BOUNDS = {"float32": (1e-4, 1e-3), "bf16": (1e-3, 2e-2)}
"""The largest relative difference of losses and of norms. One lost rank in 100 moves a norm by 1e-2; torch's own
float32 norm of 16 M elements on a CPU is off by 6e-4 (docs/LOG.md)."""


@contextlib.contextmanager
def saying_what_to_change(folder: Path) -> Iterator[None]:
    """Raises an OSError that names `folder` and what to change in place of the system's own."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{folder} cannot be written to ({error.strerror}): set output_dir, or free room") from None


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
    with saying_what_to_change(folder.parent), (folder / f"rank_{world.rank}").open("wb") as file:
        for _ in range(max(1, WRITTEN_BYTES // len(content) // world.size)):
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
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
    there = set(list_files(folder))
    if missing := [shard.name for shard in shards if shard.name not in there]:
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


class Steps(NamedTuple):
    losses: list[float]
    norms: list[float]
    seconds: list[float]


def self_test(run: RunConfig, world: World) -> tuple[float, str]:
    """Trains the recipe's shapes with NUM_BLOCKS blocks twice: by all ranks together, and by each rank alone.

    Two steps: the second sees what the first one's update made. Returns the seconds that this rank took alone for the
    second step, and how far the two trainings differ, in words. All ranks call it together.

    Raises:
        UserError: they differ by more than BOUNDS.
    """
    per_rank = run.rows_per_rank(world.size)
    rows = min(run.train.micro_batch_size, max(1, MOST_ROWS // world.size))
    num_micro_batches = 2 if per_rank.last > run.train.micro_batch_size else 1
    num_all = num_micro_batches * rows * world.size
    model = run.model.model_copy(update={"num_blocks": min(NUM_BLOCKS, run.model.num_blocks)})
    small = run.with_train(micro_batch_size=rows, global_batch_size=num_all, compile=False)
    small = small.model_copy(update={"model": model, "init_from": None})
    batches = random_batch(small.with_train(micro_batch_size=num_all), world.device).split(rows)
    own = batches[world.rank * num_micro_batches : (world.rank + 1) * num_micro_batches]
    rates = [SELF_TEST_RATE] * 2
    spread = train(small, world, own, rates)
    whole = train(small.model_copy(update={"engine": SingleConfig()}), world.alone(), batches, rates)
    name, largest = small.engine.kind, BOUNDS[small.train.precision]
    differences = [largest_difference(spread.losses, whole.losses), largest_difference(spread.norms, whole.norms)]
    text = " and ".join(f"{what} by {found:.1g}" for what, found in zip(("losses", "norms"), differences, strict=True))
    if not all(found <= bound for found, bound in zip(differences, largest, strict=True)):
        raise UserError(
            f"{name} differs from one process in its {text}; allowed are {largest[0]:g} and {largest[1]:g}. If this is "
            "so on every rank, train with another engine.kind or without engine.deepspeed_config; a rank that is alone "
            "with it computes wrongly: leave its host out"
        )
    where = f"{small.train.precision}, {num_all} rows, two steps"
    return whole.seconds[-1], f"{name} differs from one process in its {text} ({where})"


def largest_difference(values: list[float], others: list[float]) -> float:
    """Relative, and infinite if a value is not finite."""
    if not all(map(math.isfinite, values + others)):
        return math.inf
    return max(abs(one / other - 1) for one, other in zip(values, others, strict=True))


def train(run: RunConfig, world: World, micro_batches: list[MaskedBatch], rates: list[float]) -> Steps:
    """Trains a step with each learning rate on the same rows. All ranks call it together; losses are their means."""
    forget_other_recipes(world.device)
    engine, steps = build_engine_of(Pretraining(run), world, is_new=True), Steps([], [], [])
    for rate in rates:
        started, loss_sum = time.perf_counter(), 0.0
        for index, batch in enumerate(micro_batches, start=1):
            loss = engine.module(batch)
            loss_sum += loss.detach().double()
            engine.backward(loss / len(micro_batches), is_last=index == len(micro_batches))
        norm = engine.step(rate)
        steps.losses.append(world.sum([loss_sum.item()])[0] / len(micro_batches) / world.size)
        steps.norms.append(norm.item())
        steps.seconds.append(time.perf_counter() - started)
    engine.close()
    return steps


def try_recipe(run: RunConfig, world: World) -> tuple[float, str]:
    """Trains the first NUM_STEPS steps of the recipe as it is, on random rows. All ranks call it together.

    Returns the last step's seconds, and what was found, in words. UserError if a loss or a norm is not finite.
    """
    batch, num_steps = random_batch(run, world.device), run.train.num_steps
    rates = [learning_rate(run.optimizer, step, num_steps) for step in range(min(NUM_STEPS, num_steps))]
    steps = train(run, world, [batch] * run.train.num_micro_batches(world.size).at(0), rates)
    if not all(map(math.isfinite, steps.losses + steps.norms)):
        raise UserError(
            f"the losses {steps.losses} and norms {steps.norms} of the first steps are not all finite: lower "
            "optimizer.peak_learning_rate, or train in float32"
        )
    first, last = steps.seconds[0], steps.seconds[-1]
    peak_gib = peak_memory_bytes(world.device) / 2**30
    return last, f"{last:.3g} s a step (the first {first:.3g} s), {peak_gib:.2f} GiB at the peak on rank {world.rank}"
