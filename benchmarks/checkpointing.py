"""Saves and loads the recipe's state, beside a plain copy, torch.save with fsync, and torch.load of the same bytes.

torchrun --nproc_per_node 2 benchmarks/checkpointing.py --config configs/pretrain/smoke.yaml model.d_model=512

This prints how long a save stops training under every engine beside a plain copy of the rank's bytes.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch
from torch import Tensor

from benchmarks.reports import markdown
from benchmarks.timing import print_from_ranks, say, time_in_turns
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.stores import LocalCheckpoints, newest_checkpoint
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import SHARDED_ENGINES, Engine
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.trial import new_engine, seconds_of

NUM_STALLS = 15


@command
def main() -> int:
    return print_from_ranks(__doc__, measure_stalls)


def measure_stalls(run: RunConfig, world: World) -> str:
    """The median stall of a save on the slowest rank, and a plain copy there, as a Markdown table.

    All ranks call it together. The first save of each engine, which allocates the staging buffers, is not counted.
    """
    rows = []
    for name, engine_config in SHARDED_ENGINES.items():
        engine = new_engine(run.model_copy(update={"engine": engine_config}), world)
        buffers, copy = plain_copy_of(engine, world)
        folder = Path(world.on_main(tempfile.mkdtemp))
        checkpointer, rounds = checkpointer_in(folder, run, world), []
        for step in range(NUM_STALLS + 1):
            world.barrier()
            copied = seconds_of(copy, world.device)
            world.barrier()
            rounds.append((checkpointer.save(engine, step), copied))
            checkpointer.wait()
        stall, copied = (statistics.median(values) for values in zip(*rounds[1:], strict=True))
        stall, copied = max(world.gather((stall, copied)))
        num_bytes = sum(buffer.nbytes for buffer in buffers.values())
        figures = (num_bytes / 1e6, 1e3 * copied, 1e3 * stall, stall / copied)
        rows.append([name, *(f"{figure:.2f}" for figure in figures)])
        checkpointer.close()
        engine.close()
        world.on_main(lambda folder=folder: shutil.rmtree(folder))
    return markdown(["engine", "MB of a rank", "copy ms", "stall ms", "stall over copy"], rows)


def plain_copy_of(engine: Engine, world: World) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Host memory for this rank's pieces, and a call that copies them there."""
    pieces = dict(engine.state())
    buffers = {
        key: torch.empty(piece.tensor.shape, device="cpu", pin_memory=world.device.type == "cuda")
        for key, piece in pieces.items()
    }

    def copy() -> None:
        for key, piece in pieces.items():
            buffers[key].copy_(piece.tensor, non_blocking=True)

    return buffers, copy


def checkpointer_in(directory: Path, run: RunConfig, world: World) -> Checkpointer:
    """One that deletes nothing, which would be timed too."""
    config = CheckpointConfig(save_every_steps=1, keep_last=10**6)
    return Checkpointer(
        LocalCheckpoints(directory),
        config,
        details={"config": run.to_json(), "data": {"rows": 0}},
        world=world,
        timeout_seconds=run.engine.timeout_seconds,
    )


def measure_checkpoint(run: RunConfig, world: World, num_rounds: int) -> Iterator[dict]:
    """Median seconds by name, and what ours cost over the others, after each round.

    save: from the call until the checkpoint is complete on disk. stall: the part of it for which training waits.
    load: also verifies the checkpoint and fills the engine, which torch.load does not do. The first round is not
    counted: its save allocates the staging buffers that later ones use again.
    """
    engine, timed = new_engine(run, world), partial(seconds_of, device=world.device)
    buffers, copy = plain_copy_of(engine, world)

    def torch_save() -> None:
        with file.open("wb") as opened:
            torch.save(buffers, opened)
            opened.flush()
            os.fsync(opened.fileno())

    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    rounds = []
    with tempfile.TemporaryDirectory(dir=run.run_dir.parent) as folder:  # on the disk that checkpoints go to
        directory, file = Path(folder) / "checkpoints", Path(folder) / "state.pt"
        checkpointer = checkpointer_in(directory, run, world)
        for number in range(1, num_rounds + 2):
            seconds = {"copy": timed(copy), "stall": timed(partial(checkpointer.save, engine, number))}
            seconds["save"] = seconds["stall"] + timed(checkpointer.wait)
            seconds["torch_save"] = timed(torch_save)
            seconds["load"] = timed(lambda: newest_checkpoint(directory)[0].load_into(engine))
            seconds["torch_load"] = timed(lambda: torch.load(file))
            rounds.append(seconds)
            file.unlink()
            for path in directory.iterdir():
                shutil.rmtree(path)
            say(f"round {number} of {num_rounds + 1}")
            if number > 1:
                yield _figures(sum(buffer.nbytes for buffer in buffers.values()), rounds)
        checkpointer.close()


def _figures(num_bytes: int, rounds: list[dict[str, float]]) -> dict:
    seconds = {name: statistics.median(round_[name] for round_ in rounds[1:]) for name in rounds[0]}
    others = {"stall": "copy", "save": "torch_save", "load": "torch_load"}
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "first_stall_seconds": rounds[0]["stall"],
        "costs": {f"{ours}_over_{other}": seconds[ours] / seconds[other] for ours, other in others.items()},
    }


def measure_verified_load(directory: Path, engine: Engine, world: World) -> dict:
    """A verified load of the newest checkpoint beside a plain read of the same files.

    Before each, the kernel forgets the files' pages.
    """
    files = sorted(newest_checkpoint(directory)[0].path.glob("*.safetensors"))

    def load() -> None:
        newest_checkpoint(directory)[0].load_into(engine)
        world.wait_for_device()

    def read() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(read_whole, files))

    turns = {"load": partial(uncached_seconds, load, files), "plain read": partial(uncached_seconds, read, files)}
    seconds = time_in_turns(turns, num_rounds=3)
    num_bytes = sum(file.stat().st_size for file in files)
    rates = {f"{name} bytes per second": num_bytes / spent for name, spent in seconds.items()}
    return {"load_over_plain_read": seconds["plain read"] / seconds["load"], "bytes": num_bytes, **rates}


def uncached_seconds(call: Callable[[], None], files: list[Path]) -> float:
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def read_whole(file: Path) -> None:
    buffer = bytearray(2**23)
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


if __name__ == "__main__":
    sys.exit(main())
