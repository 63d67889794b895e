"""The checkpoints of this project and those of the parts that it stands on or could stand on, saved and loaded alike.

Every part has save(folder, step) and load(folder) -> tensors by key; load raises where it finds something wrong. All
values of a tensor are the step, so that a mixed checkpoint shows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.checkpoint.fake_engine import KEYS, LENGTH
from tests.checkpoint.test_checkpointer_kills import save_step, start_ranks
from tests.faults.table import OURS

State = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    save: Callable[[Path, int], None]
    load: Callable[[Path], State]


def state_of(step: int) -> State:
    return {key: torch.full((LENGTH, 8), float(step)) for key in KEYS}


def is_whole(state: State, steps: tuple[int, ...]) -> bool:
    """Whether it is the state of one of these steps."""
    return any(
        state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
        for wanted in map(state_of, steps)
    )


def _save_ours(folder: Path, step: int) -> None:
    (checkpointer,) = start_ranks(folder, world_size=1)
    checkpointer.world.is_stop_signalled = True  # so that nothing waits for room
    save_step([checkpointer], step)


def _load_ours(folder: Path) -> State:
    checkpoint, damaged = newest_checkpoint(folder)
    if damaged:
        raise ValueError(f"passed over {damaged}")
    return {key: checkpoint.read(key) for key in checkpoint.keys}


def _load_dcp(folder: Path) -> State:
    state = {key: torch.empty_like(tensor) for key, tensor in state_of(0).items()}
    dcp.load(state, checkpoint_id=folder)
    return state


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ParameterDict(
            {key.removeprefix("model."): nn.Parameter(value) for key, value in state_of(0).items()}
        )


@functools.cache
def _deepspeed_engine():
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)[0]


@torch.no_grad()
def _fill(engine, value: float) -> None:
    for parameter in engine.module.parameters():
        parameter.fill_(value)
    for group in engine.optimizer.single_partition_of_fp32_groups:
        group.fill_(value)


def _save_deepspeed(folder: Path, step: int) -> None:
    engine = _deepspeed_engine()
    _fill(engine, step)
    engine.save_checkpoint(str(folder), tag=f"step_{step}")


def _load_deepspeed(folder: Path) -> State:
    engine = _deepspeed_engine()
    _fill(engine, -1)
    path, _ = engine.load_checkpoint(str(folder))
    if path is None:
        raise ValueError("no checkpoint")
    return {key: value.detach().clone() for key, value in engine.module.state_dict().items()}


PARTS = {
    OURS: Part(_save_ours, _load_ours),
    "torch.save": Part(
        lambda folder, step: torch.save(state_of(step), folder / "checkpoint.pt"),
        lambda folder: torch.load(folder / "checkpoint.pt"),
    ),
    "safetensors": Part(
        lambda folder, step: save_file(state_of(step), folder / "model.safetensors"),
        lambda folder: load_file(folder / "model.safetensors"),
    ),
    "DCP": Part(lambda folder, step: dcp.save(state_of(step), checkpoint_id=folder), _load_dcp),
    "DeepSpeed": Part(_save_deepspeed, _load_deepspeed),
}
"""torch.save, safetensors and DCP save into the same place again, DeepSpeed and this project into a new folder."""
