"""Finds a rank that computes wrongly: `train.recheck_every_steps`.

A damaged chip or memory gives wrong numbers without an error (Llama 3's report counts 6 such stops in 54 days). So each
rank computes one micro-batch twice and compares all bits, and all ranks compare the weights that they hold in common.
"""

from collections import Counter

import torch
from torch import Tensor

from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.errors import UserError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RecheckError(UserError):
    """A rank computed one micro-batch twice with different results, or holds other weights than the other ranks."""


def recheck(engine: Engine, world: World, micro_batch, seed: int, step: int) -> None:
    """Computes loss and gradients of this rank's `micro_batch` twice. The training step is not changed by it.

    Args:
        seed: for dropout, the same both times.
        step: the one that comes next, for the message.

    Raises:
        RecheckError: on every rank, with the ranks that differ.
    """
    first, second = (_sums(engine, micro_batch, seed) for _ in range(2))
    unsteady = [rank for rank, differs in enumerate(world.gather(first != second)) if differs]
    if unsteady:
        raise RecheckError(_message(world, step, unsteady, "computed one micro-batch twice and got two results"))
    weights = world.gather(first[0])
    usual, num_usual = Counter(weights).most_common(1)[0]
    if num_usual == world.size:
        return
    if num_usual <= world.size / 2:
        raise RecheckError(_message(world, step, list(range(world.size)), "do not all hold the same weights"))
    others = [rank for rank, sum_of_rank in enumerate(weights) if sum_of_rank != usual]
    raise RecheckError(_message(world, step, others, "holds other weights than most ranks"))


def _sums(engine: Engine, micro_batch, seed: int) -> tuple[int, int, int]:
    """Checksums of the weights, the loss and the gradients."""
    torch.manual_seed(seed)
    loss, weights, gradients = engine.differentiate(micro_batch)
    weights_sum, loss_sum, gradients_sum = (checksum(tensors) for tensors in (weights, [loss], gradients))
    return weights_sum, loss_sum, gradients_sum


@torch.no_grad()
def checksum(tensors: list[Tensor]) -> int:
    """The sum of all elements' bits, read as integers. Any one element that changes, changes it."""
    sums = [tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum().item()


def _message(world: World, step: int, ranks: list[int], found: str) -> str:
    return (
        f"before step {step} {world.names_of(ranks)} {found}: the hardware there is likely at fault. Take the host "
        "out; the same command resumes from the newest checkpoint. If the fault may be older, first delete the "
        "checkpoints that you doubt"
    )
