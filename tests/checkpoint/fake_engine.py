"""An engine that is only its tensors, and checkpointers of as many ranks as a test wants, each on a thread."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.checkpoint.stores import LocalCheckpoints
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Piece
from gmlp_scale.storage.files import sealed

SHAPES = {
    "model.embedding.weight": (7, 3),
    "model.blocks.0.norm.bias": (5,),
    "model.blocks.0.weight": (4, 3, 2),
    "model.temperature": (),
    "optimizer.embedding.weight.exp_avg": (7, 3),
}

DETAILS = {"config": {"train": {}, "optimizer": {}}, "data": {"rows": 40}}

KEYS, LENGTH = ["model.a", "model.b", "model.c"], 64
"""Of a StepEngine's tensors, which are (LENGTH, 8)."""


class FakeEngine:
    """Owns slices of a few tensors as FSDP2 splits them: equal chunks, the last short or empty. Rank 0 has scalars.
    Or chunks of the flattened tensors, similar to ZeRO."""

    def __init__(self, rank: int = 0, world_size: int = 1, seed: int = 0, by_elements: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
        self.rank, self.world_size, self.by_elements = rank, world_size, by_elements
        self.num_state_calls = 0

    def owned_slice(self, key: str) -> tuple[int, int]:
        length = self.tensors[key].numel() if self.by_elements else SHAPES[key][0]
        chunk = -(-length // self.world_size)
        return min(self.rank * chunk, length), min((self.rank + 1) * chunk, length)

    def state(self):
        self.num_state_calls += 1
        for key, tensor in self.tensors.items():
            if tensor.ndim or self.by_elements:
                first, stop = self.owned_slice(key)
                owned = (tensor.flatten() if self.by_elements else tensor)[first:stop]
                yield key, Piece(owned, SHAPES[key], first)
            elif self.rank == 0:
                yield key, Piece(tensor, (), 0)

    def load_state(self, read, step: int) -> None:
        self.step = step
        for key, tensor in self.tensors.items():
            if tensor.ndim and not self.by_elements:
                first, stop = self.owned_slice(key)
                self.tensors[key] = torch.full(SHAPES[key], torch.nan)
                self.tensors[key][first:stop] = read(key, first, stop)
            else:
                self.tensors[key] = read(key, 0, None)


class StepEngine:
    """Owns an equal share of tensors whose values are all the step, so that a mixed checkpoint would show."""

    def __init__(self, rank: int, world_size: int, step: int, on_piece=lambda: None):
        self.rank, self.world_size, self.step, self.on_piece = rank, world_size, step, on_piece

    def state(self):
        share = LENGTH // self.world_size
        for key in KEYS:
            self.on_piece()
            yield key, Piece(torch.full((share, 8), float(self.step)), (LENGTH, 8), self.rank * share)


class FakeWorld:
    """A rank on a thread: what a Checkpointer uses of a World."""

    def __init__(self, rank: int = 0, size: int = 1, shared: "Shared | None" = None):
        self.rank, self.local_rank, self.size, self.shared = rank, rank, size, shared or Shared(1)
        self.store, self.is_stop_signalled, self.has_lost_ranks = self.shared.store, False, False

    on_all, on_main, names_of = World.on_all, World.on_main, World.names_of

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        return f"rank {rank}"

    def gather(self, value):
        self.shared.values[self.rank] = json.dumps(value)
        self.shared.barrier.wait()
        values = [json.loads(text) for text in self.shared.values]
        self.shared.barrier.wait()
        return values


class Shared:
    """What the ranks on threads of one process have in common; `num_threads` of them meet."""

    def __init__(self, num_threads: int):
        self.barrier = threading.Barrier(num_threads, timeout=300)
        self.store, self.values = dist.HashStore(), ["null"] * num_threads


def on_ranks(world_size: int, function):
    """Call function(world) on one thread per rank and return the ranks' results."""
    shared = Shared(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        worlds = [FakeWorld(rank, world_size, shared) for rank in range(world_size)]
        return [future.result() for future in [pool.submit(function, world) for world in worlds]]


def checkpointer_on(
    directory: Path, world: FakeWorld, *, timeout_seconds: float = 300, details=None, **config
) -> Checkpointer:
    """One rank's, which saves after every step."""
    config = CheckpointConfig(save_every_steps=1, **config)
    checkpoints = LocalCheckpoints(directory) if isinstance(directory, Path) else directory
    return Checkpointer(checkpoints, config, details=details or DETAILS, world=world, timeout_seconds=timeout_seconds)


def alone(directory: Path, keep_last: int = 9, waits_for_room: bool = True, **options) -> Checkpointer:
    world = FakeWorld()
    world.is_stop_signalled = not waits_for_room
    return checkpointer_on(directory, world, keep_last=keep_last, **options)


def save_steps(directory: Path, steps: list[int], world_size: int = 1, by_elements: bool = False, **options):
    """Save the state of seed `step` as each of `steps`."""

    def save_all(world):
        checkpointer = checkpointer_on(directory, world, **{"keep_last": 9} | options)
        for step in steps:
            checkpointer.save(FakeEngine(world.rank, world_size, step, by_elements), step)
        checkpointer.wait()
        checkpointer.close()

    on_ranks(world_size, save_all)


def assert_holds(checkpoint: Checkpoint, seed: int) -> None:
    expected = FakeEngine(seed=seed).tensors
    assert set(checkpoint.keys) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.read(key), tensor), key


def assert_holds_its_step(checkpoint: Checkpoint) -> None:
    """Whether a StepEngine's checkpoint is of one step throughout."""
    assert checkpoint.keys == KEYS
    for key in KEYS:
        assert torch.equal(checkpoint.read(key), torch.full((LENGTH, 8), float(checkpoint.step)))


def reseal(folder: Path, change) -> None:
    """What an attacker who can write DONE would do."""
    done = json.loads((folder / "DONE").read_text())
    del done["xxh3_128"]
    change(done)
    (folder / "DONE").write_text(sealed(json.dumps(done)))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
