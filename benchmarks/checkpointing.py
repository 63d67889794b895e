"""Saves and loads the recipe's state, beside a plain copy, torch.save with fsync, and torch.load of the same bytes."""

import os
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import say
from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.stores import LocalCheckpoints, newest_checkpoint
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.trial import new_engine, seconds_of


def measure_checkpoint(run: RunConfig, world: World, num_rounds: int) -> dict:
    """The first round is not counted: its save allocates the staging buffers that later ones use again."""
    engine = new_engine(run, world)
    buffers = {
        key: torch.empty(piece.tensor.shape, device="cpu", pin_memory=world.device.type == "cuda")
        for key, piece in engine.state()
    }
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    rounds = []
    with tempfile.TemporaryDirectory(dir=run.run_dir.parent) as folder:  # on the disk that checkpoints go to
        checkpointer = Checkpointer(
            LocalCheckpoints(Path(folder) / "checkpoints"),
            CheckpointConfig(save_every_steps=1, keep_last=10**6),  # deleting is not timed
            details={},
            world=world,
            timeout_seconds=run.engine.timeout_seconds,
        )
        for number in range(1, num_rounds + 2):
            rounds.append(measure_round(engine, checkpointer, buffers, number, world.device))
            say(f"round {number} of {num_rounds + 1}")
        checkpointer.close()
    seconds = {name: statistics.median(round_[name] for round_ in rounds[1:]) for name in rounds[0]}
    return {
        "bytes": sum(buffer.nbytes for buffer in buffers.values()),
        "seconds": seconds,
        "first_stall_seconds": rounds[0]["stall"],
        "costs": {
            "stall_over_copy": seconds["stall"] / seconds["copy"],
            "save_over_torch_save": seconds["save"] / seconds["torch_save"],
            "load_over_torch_load": seconds["load"] / seconds["torch_load"],
        },
    }


def measure_round(
    engine: Engine, checkpointer: Checkpointer, buffers: dict[str, Tensor], step: int, device: torch.device
) -> dict[str, float]:
    """Seconds by name.

    save: from the call until the checkpoint is complete on disk. stall: the part of it for which training waits.
    load: also verifies the checkpoint and fills the engine, which torch.load does not do.
    """
    directory = checkpointer.checkpoints.directory
    file = directory.with_name("state.pt")

    def copy() -> None:
        for key, piece in engine.state():
            buffers[key].copy_(piece.tensor, non_blocking=True)

    def torch_save() -> None:
        with file.open("wb") as opened:
            torch.save(buffers, opened)
            opened.flush()
            os.fsync(opened.fileno())

    seconds = {"copy": seconds_of(copy, device)}
    seconds["stall"] = seconds_of(lambda: checkpointer.save(engine, step), device)
    seconds["save"] = seconds["stall"] + seconds_of(checkpointer.wait, device)
    seconds["torch_save"] = seconds_of(torch_save, device)
    seconds["load"] = seconds_of(lambda: newest_checkpoint(directory)[0].load_into(engine), device)
    seconds["torch_load"] = seconds_of(lambda: torch.load(file), device)
    file.unlink()
    for path in directory.iterdir():
        shutil.rmtree(path)
    return seconds
