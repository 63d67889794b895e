"""A gradient that is not finite on one rank: no rank and no engine updates anything, and all report the norm."""

import itertools
import math

import pytest
import torch

from gmlp_scale.world import World, start_world
from tests.engine.trained_engines import AMLP, ENGINES, SHARDED, micro_batches_of, pieces_of, start_engine, train
from tests.gloo_ranks import run_ranks

SINGLE = {"single": ENGINES["single"]}


def _bad_step(engine, world: World, factor: float) -> float:
    """The norm of a step whose first micro-batch is spoilt on the last rank alone."""
    micro_batches = micro_batches_of(50, world)
    for index, batch in enumerate(micro_batches, start=1):
        loss = engine.module(batch)
        spoilt = index == 1 and world.rank == world.size - 1
        engine.backward(loss * factor if spoilt else loss, is_last=index == len(micro_batches))
    return engine.step(0.01).item()


def _train_through_bad_steps(engine_configs: dict) -> dict:
    """By engine and precision: the bad norms, whether the state stayed, whether training went on as if undisturbed."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, precision in itertools.product(engine_configs, ("float32", "bf16")):
            engine = start_engine(world, AMLP, engine_configs[name], precision)
            undisturbed = [train(engine, world, 0, 2), train(engine, world, 2, 4)]
            engine.close()

            engine = start_engine(world, AMLP, engine_configs[name], precision)
            norms = [_bad_step(engine, world, math.nan)]
            runs = [train(engine, world, 0, 2)]
            before = pieces_of(engine)
            norms += [_bad_step(engine, world, math.inf), _bad_step(engine, world, math.nan)]
            after = pieces_of(engine)
            runs.append(train(engine, world, 2, 4))  # the same only if AdamW's step count was left alone too
            engine.close()

            unchanged = before.keys() == after.keys() and all(torch.equal(before[k][0], after[k][0]) for k in before)
            results[name, precision] = norms, unchanged, runs == undisturbed
    return results


@pytest.mark.parametrize(("world_size", "engines"), [(1, SINGLE), (2, SHARDED)])
def test_a_step_that_is_not_finite_changes_nothing(world_size, engines):
    for results in run_ranks(_train_through_bad_steps, world_size, engines):
        for key, (norms, unchanged, goes_on_as_if_undisturbed) in results.items():
            assert not any(math.isfinite(norm) for norm in norms), key
            assert unchanged, key
            assert goes_on_as_if_undisturbed, key
