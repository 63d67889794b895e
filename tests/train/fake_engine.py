"""An engine that is only its tensors, and checkpointers of as many ranks as a test wants, each on a thread."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gmlp_scale.engine import Piece
from gmlp_scale.train.checkpoint import Checkpoint
from gmlp_scale.train.checkpoint_files import sealed
from gmlp_scale.train.checkpointer import CheckpointConfig, Checkpointer

SHAPES = {
    "model.embedding.weight": (7, 3),
    "model.blocks.0.norm.bias": (5,),
    "model.blocks.0.weight": (4, 3, 2),
    "model.temperature": (),
    "optimizer.embedding.weight.exp_avg": (7, 3),
}


class FakeEngine:
    """Owns slices of a few tensors as FSDP2 splits them: equal chunks, the last short or empty. Rank 0 has scalars."""

    def __init__(self, rank: int = 0, world_size: int = 1, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
        self.rank, self.world_size = rank, world_size
        self.num_state_calls = 0

    def owned_slice(self, key: str) -> tuple[int, int]:
        length = SHAPES[key][0]
        chunk = -(-length // self.world_size)
        return min(self.rank * chunk, length), min((self.rank + 1) * chunk, length)

    def state(self):
        self.num_state_calls += 1
        for key, tensor in self.tensors.items():
            if tensor.ndim:
                first, stop = self.owned_slice(key)
                yield key, Piece(tensor[first:stop], SHAPES[key], first)
            elif self.rank == 0:
                yield key, Piece(tensor, (), 0)

    def load_state(self, read, step: int) -> None:
        self.step = step
        for key, tensor in self.tensors.items():
            if tensor.ndim:
                first, stop = self.owned_slice(key)
                self.tensors[key] = torch.full(SHAPES[key], torch.nan)
                self.tensors[key][first:stop] = read(key, first, stop)
            else:
                self.tensors[key] = read(key, 0, None)


def on_ranks(world_size: int, function):
    """Call function(rank, broadcast) on one thread per rank and return the ranks' results."""
    barrier, shared = threading.Barrier(world_size, timeout=30), [None]

    def call(rank: int):
        def broadcast(value):
            if rank == 0:
                shared[0] = json.dumps(value)
            barrier.wait()
            received = json.loads(shared[0])
            barrier.wait()
            return received

        return function(rank, broadcast)

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(call, rank) for rank in range(world_size)]]


def checkpointer_on(
    directory: Path, rank: int, world_size: int, broadcast, *, timeout_seconds: float = 300, details=None, **config
) -> Checkpointer:
    """One rank's, which saves after every step."""
    return Checkpointer(
        directory,
        CheckpointConfig(save_every_steps=1, **config),
        details=details or {},
        rank=rank,
        world_size=world_size,
        broadcast=broadcast,
        timeout_seconds=timeout_seconds,
    )


def alone(directory: Path, keep_last: int = 9, **options) -> Checkpointer:
    return checkpointer_on(directory, 0, 1, lambda value: value, keep_last=keep_last, **options)


def save_steps(directory: Path, steps: list[int], world_size: int = 1, **options):
    """Save the state of seed `step` as each of `steps`."""

    def save_all(rank, broadcast):
        details = {"name": "of a test"}
        options_of_all = {"keep_last": 9, "details": details} | options
        checkpointer = checkpointer_on(directory, rank, world_size, broadcast, **options_of_all)
        for step in steps:
            checkpointer.save(FakeEngine(rank, world_size, seed=step), step)
        checkpointer.wait()
        checkpointer.close()

    on_ranks(world_size, save_all)


def assert_holds(checkpoint: Checkpoint, seed: int) -> None:
    expected = FakeEngine(seed=seed).tensors
    assert set(checkpoint.keys) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read(key), tensor), key


def reseal(folder: Path, change) -> None:
    """What an attacker who can write DONE would do."""
    done = json.loads((folder / "DONE").read_text())
    del done["xxh3_128"]
    change(done)
    (folder / "DONE").write_text(sealed(json.dumps(done)))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
