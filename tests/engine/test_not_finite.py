"""A gradient that is not finite on one rank: no rank and no engine updates anything, and all report the norm."""

import itertools
import math

import pytest
import torch

from gmlp_scale.distributed.world import World, start_world
from tests.engine.trained_engines import AMLP, MUON, SHARDED, SINGLE, micro_batches_of, pieces_of, start_engine, train
from tests.gloo_ranks import run_ranks

OPTIONS = {"float32": {}, "bf16": {"precision": "bf16"}, "muon": {"optimizer": MUON}}


def _bad_step(engine, world: World, factor: float) -> float:
    """The norm of a step whose first micro-batch is spoilt on the last rank alone."""
    micro_batches = micro_batches_of(50, world)
    for index, batch in enumerate(micro_batches, start=1):
        loss = engine.module(batch)
        spoilt = index == 1 and world.rank == world.size - 1
        engine.backward(loss * factor if spoilt else loss, is_last=index == len(micro_batches))
    return engine.step(0.01).item()


def _counts(engine) -> set[float]:
    """What AdamW counts, of every parameter of this rank."""
    optimizers = [getattr(engine, "adamw", None)]
    optimizers += [getattr(engine, name).optimizer for name in ("masters", "vector_masters") if hasattr(engine, name)]
    return {state["step"].item() for optimizer in filter(None, optimizers) for state in optimizer.state.values()}


def _train_through_bad_steps(engine_configs: dict) -> dict:
    """By engine and option: the bad norms, whether the state stayed, AdamW's counts after 4 good and 3 bad steps."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, option in itertools.product(engine_configs, OPTIONS):
            engine = start_engine(world, AMLP, engine_configs[name], **OPTIONS[option])
            norms = [_bad_step(engine, world, math.nan)]
            train(engine, world, 0, 2)
            before = pieces_of(engine)
            norms += [_bad_step(engine, world, math.inf), _bad_step(engine, world, math.nan)]
            after = pieces_of(engine)
            train(engine, world, 2, 4)
            counts = _counts(engine)
            engine.close()

            unchanged = before.keys() == after.keys() and all(torch.equal(before[k][0], after[k][0]) for k in before)
            results[name, option] = norms, unchanged, counts
    return results


@pytest.mark.parametrize(("world_size", "engines"), [(1, SINGLE), (2, SHARDED)])
def test_a_step_that_is_not_finite_changes_nothing(world_size, engines):
    for results in run_ranks(_train_through_bad_steps, world_size, engines):
        for key, (norms, unchanged, counts) in results.items():
            assert not any(math.isfinite(norm) for norm in norms), key
            assert unchanged, key
            assert counts == {7}, key  # the step, as a resumed run counts
