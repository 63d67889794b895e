"""Tries the collectives that engines use on numbers whose results are known: are they right, and how fast?"""

import statistics
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gmlp_scale.distributed.world import World

NUM_TIMES = 3
WIRE_SHARES = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
"""How often a ring sends the bytes of the whole tensor, times (R - 1) / R with R ranks."""


class Tried(NamedTuple):
    num_wrong: int
    """Elements of this rank's result that are wrong."""
    seconds: float
    """The median of NUM_TIMES."""
    bytes_per_second: float
    """Sent by this rank over a ring."""


def try_collective(kind: str, num_bytes: int, world: World) -> Tried:
    """`kind`, one of WIRE_SHARES, with float32 tensors of `num_bytes` as a whole. All ranks call it together."""
    size, rank, device = world.size, world.rank, world.device
    num_own = max(1, num_bytes // 4 // size)
    # Small whole numbers, so that their sums are exact in float32.
    numbers = (torch.arange(num_own * size, device=device) % 251).float()
    sums = numbers * size + size * (size - 1) // 2
    match kind:
        case "all-reduce":
            given, expected = numbers + rank, sums
        case "reduce-scatter":
            given, expected = numbers + rank, sums.view(size, num_own)[rank]
        case "all-gather":
            parts = numbers.view(size, num_own)
            given, expected = parts[rank] + rank, (parts + torch.arange(size, device=device)[:, None]).flatten()
    times = []
    for _ in range(NUM_TIMES):
        result = given.clone() if kind == "all-reduce" else torch.full_like(expected, torch.nan)
        world.barrier()
        world.wait_for_device()
        started = time.perf_counter()
        _run(kind, given, result)
        world.wait_for_device()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    sent = WIRE_SHARES[kind] * 4 * num_own * (size - 1)
    return Tried(int((result != expected).sum()), seconds, sent / seconds)


def _run(kind: str, given: Tensor, result: Tensor) -> None:
    with warnings.catch_warnings():
        # torch 2.13 has new names for them, which older releases lack.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        match kind:
            case "all-reduce":
                dist.all_reduce(result)
            case "reduce-scatter":
                dist.reduce_scatter_tensor(result, given)
            case "all-gather":
                dist.all_gather_into_tensor(result, given)
