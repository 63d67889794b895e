"""The engine on this hardware: its gradients beside those of one process, and a few steps of the whole recipe."""

import math
import time
from typing import NamedTuple

from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import SingleConfig
from gmlp_scale.errors import UserError
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.metrics import peak_memory_bytes
from gmlp_scale.train.run import build_engine_of
from gmlp_scale.train.schedule import learning_rate
from gmlp_scale.trial.random_step import forget_other_recipes, random_batch

NUM_BLOCKS = 2
NUM_STEPS = 3
SELF_TEST_RATE = 1e-3
MOST_ROWS = 32
"""Of all ranks' self-test micro-batches together; one for each rank if there are more ranks."""
BOUNDS = {"float32": (1e-4, 1e-3), "bf16": (1e-3, 2e-2)}
"""The largest relative difference of losses and of norms. One lost rank in 100 moves a norm by 1e-2; torch's own
float32 norm of 16 M elements on a CPU is off by 6e-4 (docs/LOG.md)."""


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
    small = _with(run, rows, num_micro_batches * rows * world.size, min(NUM_BLOCKS, run.model.num_blocks))
    num_all = small.train.global_batch_size
    batches = random_batch(_with(small, num_all, num_all, small.model.num_blocks), world.device).split(rows)
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


def _with(run: RunConfig, micro_batch_size: int, global_batch_size: int, num_blocks: int) -> RunConfig:
    sized = run.with_train(micro_batch_size=micro_batch_size, global_batch_size=global_batch_size, compile=False)
    return sized.model_copy(
        update={"model": run.model.model_copy(update={"num_blocks": num_blocks}), "init_from": None}
    )


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
