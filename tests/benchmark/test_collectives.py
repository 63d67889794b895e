"""Bytes per parameter and step that every engine's collectives carry, counted on two ranks."""

import pytest

from gmlp_scale.benchmark.collectives import ENGINES, bytes_per_parameter
from gmlp_scale.config import load_run_config
from gmlp_scale.world import start_world
from tests.benchmark.smoke_recipe import SMOKE
from tests.gloo_ranks import run_ranks

# Most matrices have more than the 100,000 elements up to which ZeRO-3 keeps them gathered.
OVERRIDES = ["model.d_model=256", "model.d_ffn=1024", "train.micro_batch_size=1", "train.precision=bf16"]
WANTED = {
    # all-reduce, reduction to owners, gather, by number of micro-batches
    "fsdp2": {1: (0, 4, 2), 2: (0, 4, 2)},
    "fsdp2, reshard_after_forward": {1: (0, 4, 4), 2: (0, 4, 8)},
    "zero, stage 1": {1: (4, 0, 2), 2: (4, 0, 2)},
    "zero, stage 2": {1: (0, 4, 2), 2: (0, 8, 2)},
    "zero, stage 3": {1: (0, 4, 2), 2: (0, 8, 4)},
}


def _count_each() -> dict:
    run = load_run_config(SMOKE, OVERRIDES)
    with start_world(60, "cpu", init_group=True) as world:
        return {
            (name, num): bytes_per_parameter(run, engine, world, num)
            for name, engine in ENGINES.items()
            for num in (1, 2)
        }


def test_every_engine_carries_the_bytes_that_its_table_says():
    for counted in run_ranks(_count_each, 2):
        for (name, num_micro_batches), by_kind in counted.items():
            all_reduced, reduced, gathered = WANTED[name][num_micro_batches]
            found = [by_kind[kind] for kind in ("all_reduce", "reduce", "gather")]
            assert found == pytest.approx([all_reduced, reduced, gathered], rel=0.02, abs=0.05), name
            assert by_kind["wire"] == pytest.approx(2 * all_reduced + reduced + gathered, rel=0.02), name
