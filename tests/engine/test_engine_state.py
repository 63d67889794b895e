"""state() and load_state(): the same run goes on bit for bit, and any engine goes on from any other's."""

import itertools

import pytest
import torch
import torch.distributed as dist

from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.models import build_model
from tests.engine.trained_engines import (
    AMLP,
    ENGINES,
    MUON,
    SHARDED,
    SINGLE,
    SIZES,
    pieces_of,
    reader,
    start_engine,
    train,
)
from tests.gloo_ranks import run_ranks

OPTIONS = {"float32": {}, "bf16, recomputing": {"precision": "bf16", "recompute": "full"}, "muon": {"optimizer": MUON}}


AMLP_LINEARS = ("expand", "attention.qkv", "attention.out", "project")


def _all_pieces(engine, world: World) -> list[dict]:
    pieces_by_rank = [None] * world.size
    dist.all_gather_object(pieces_by_rank, pieces_of(engine))
    return pieces_by_rank


def _stop_and_go_on(engine_configs: dict) -> dict:
    """By engine and option: the run from step 2 on, never stopped and stopped twice, and the pieces at 0 and 2."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, option in itertools.product(engine_configs, OPTIONS):
            engine = start_engine(world, AMLP, engine_configs[name], **OPTIONS[option])
            at_0 = _all_pieces(engine, world)
            train(engine, world, 0, 2)
            at_2 = _all_pieces(engine, world)
            never_stopped = [train(engine, world, 2, 3), train(engine, world, 3, 5)]
            engine.close()

            resumed, pieces = [], at_2
            for step, stop_step in ((2, 3), (3, 5)):
                engine = start_engine(world, AMLP, engine_configs[name], **OPTIONS[option])
                engine.load_state(reader(pieces), step)
                resumed.append(train(engine, world, step, stop_step))
                pieces = _all_pieces(engine, world)
                engine.close()
            results[name, option] = {"never stopped": never_stopped, "resumed": resumed, 0: at_0, 2: at_2}
    return results


def _go_on(engine_configs: dict, checkpoints: dict) -> dict:
    """By engine, name of a checkpoint and option: the run from step 2 to 5."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, (source, option) in itertools.product(engine_configs, checkpoints):
            engine = start_engine(world, AMLP, engine_configs[name], **OPTIONS[option])
            engine.load_state(reader(checkpoints[source, option]), 2)
            results[name, source, option] = train(engine, world, 2, 5)
            engine.close()
    return results


@pytest.fixture(scope="module")
def one_rank() -> dict:
    return run_ranks(_stop_and_go_on, 1, SINGLE | {"zero, stage 2": SHARDED["zero, stage 2"]})[0]


@pytest.fixture(scope="module")
def two_ranks() -> dict:
    return run_ranks(_stop_and_go_on, 2, SHARDED)[0]


def test_the_same_engine_goes_on_bit_for_bit_twice_in_a_row(one_rank, two_ranks):
    for runs in (one_rank, two_ranks):
        for key, run in runs.items():
            assert run["resumed"] == run["never stopped"], key


@pytest.mark.parametrize(
    ("world_size", "engines", "sources"),
    [
        (1, [*ENGINES], [("zero, stage 2", "float32"), ("zero, stage 3", "muon")]),
        (2, [*SHARDED], [("zero, stage 2", "float32"), ("fsdp2", "float32"), ("single", "float32"), ("fsdp2", "muon")]),
        (4, ["fsdp2", "zero, stage 3"], [("zero, stage 3", "float32"), ("zero, stage 2", "muon")]),
    ],
)
def test_any_engine_goes_on_from_any_other(one_rank, two_ranks, world_size, engines, sources):
    checkpoints = {source: (one_rank | two_ranks)[source][2] for source in sources}
    engine_configs = {name: ENGINES[name] for name in engines}
    for case, run in run_ranks(_go_on, world_size, engine_configs, checkpoints)[0].items():
        expected = one_rank["single", case[-1]]["never stopped"]
        assert run.losses == pytest.approx(expected[0].losses + expected[1].losses, rel=1e-5), case
        assert run.norms == pytest.approx(expected[0].norms + expected[1].norms, rel=1e-5), case


def test_before_the_first_step_the_state_is_the_initial_float32_weights_and_zero_moments(one_rank, two_ranks):
    parameters = dict(build_model(AMLP).named_parameters())
    matrices = [f"blocks.{block}.{layer}.weight" for block in range(3) for layer in AMLP_LINEARS]
    for (_, option), run in [*one_rank.items(), *two_ranks.items()]:
        in_muon = matrices if option == "muon" else []
        moments = {f"optimizer.{name}.{m}" for name in parameters.keys() - in_muon for m in ("exp_avg", "exp_avg_sq")}
        moments |= {f"optimizer.{name}.momentum" for name in in_muon}
        read = reader(run[0])
        assert {key for pieces in run[0] for key, _ in pieces} == {f"model.{name}" for name in parameters} | moments
        for name, parameter in parameters.items():
            assert torch.equal(read(f"model.{name}", 0, None), parameter)  # in bf16 too: nothing was rounded
        assert not any(read(key, 0, None).any() for key in moments)


def test_the_ranks_share_the_state_evenly(two_ranks):
    largest_parameter = SIZES["vocab_size"] * SIZES["d_model"]
    for run in two_ranks.values():
        shares = [sum(tensor.numel() for tensor, _ in pieces.values()) for pieces in run[2]]
        assert abs(shares[0] - shares[1]) <= 3 * largest_parameter
