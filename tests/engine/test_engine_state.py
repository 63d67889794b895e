"""state() and load_state(): the same run goes on bit for bit, and any engine goes on from any other's. A step that is
not finite changes nothing: when one rank's gradient is not finite, no engine updates anything, and all ranks report it.
"""

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gmlp_scale.checkpoint.checkpointer import Checkpointer
from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.stores import LocalCheckpoints, newest_checkpoint
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.models import build_model
from gmlp_scale.train.trial import ByteCounts
from tests.checkpoint.fake_engine import DETAILS
from tests.engine.trained_engines import (
    AMLP,
    ENGINES,
    OPTIONS,
    SHARDED,
    SINGLE,
    SIZES,
    micro_batches_of,
    pieces_of,
    reader,
    start_engine,
    train,
)
from tests.gloo_ranks import run_ranks

AMLP_LINEARS = ("expand", "attention.qkv", "attention.out", "project")


def _all_pieces(engine, world: World) -> list[dict]:
    pieces_by_rank = [None] * world.size
    dist.all_gather_object(pieces_by_rank, pieces_of(engine))
    return pieces_by_rank


def _stop_and_go_on(engine_configs: dict) -> dict:
    """By engine and option: the run from step 2 on, never stopped and stopped twice, and the pieces at 0 and 2."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, option in itertools.product(engine_configs, ("float32", "bf16, recomputing", "muon")):
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


def _count_collectives(engine_configs: dict, folder: Path) -> dict:
    """What a save carries between its call and its return, by engine and optimizer."""
    counted = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, option in itertools.product(engine_configs, ("bf16", "muon")):
            engine = start_engine(world, AMLP, engine_configs[name], **OPTIONS[option])
            train(engine, world, 0, 1)
            place, config = LocalCheckpoints(folder / f"{name} {option}"), CheckpointConfig(save_every_steps=1)
            checkpointer = Checkpointer(place, config, details=DETAILS, world=world, timeout_seconds=60)
            with ByteCounts() as counts:
                checkpointer.save(engine, 1)
            checkpointer.wait()
            checkpointer.close()
            counted[name, option] = dict(counts.num_calls)
            engine.close()
        with ByteCounts() as counts:
            world.gather(False)  # whether the run folder is there
            world.gather(False)  # whether a save is under way
    return counted | {"agreeing": dict(counts.num_calls)}


def test_a_save_sends_nothing_but_two_agreements_and_its_files_hold_the_same_from_every_engine(tmp_path):
    counted = run_ranks(_count_collectives, 2, SHARDED, tmp_path)[0]
    assert counted.pop("agreeing") == {"gather": 4}
    assert len(counted) == 2 * len(SHARDED) and list(counted.values()) == [{"gather": 4}] * len(counted), counted
    saved = {}
    for name in SHARDED:
        checkpoint, _ = newest_checkpoint(tmp_path / f"{name} muon")
        saved[name] = {key: checkpoint.read(key) for key in checkpoint.keys}
        assert checkpoint.misfit(build_model(AMLP)) == ""
        torch.testing.assert_close(saved[name], saved["fsdp2"], rtol=1e-4, atol=1e-6)


def _bad_step(engine, world: World, factor: float) -> float:
    """The norm of a step whose first micro-batch is spoilt on the last rank alone."""
    micro_batches = micro_batches_of(50, world)
    for index, batch in enumerate(micro_batches, start=1):
        loss = engine.module(batch)
        spoilt = index == 1 and world.rank == world.size - 1
        engine.backward(loss * factor if spoilt else loss, is_last=index == len(micro_batches))
    return engine.step(0.01).item()


def _counts(engine) -> set[float]:
    """What this rank's AdamWs count."""
    optimizers = [getattr(engine, "adamw", None)]
    optimizers += [getattr(engine, name).optimizer for name in ("masters", "vector_masters") if hasattr(engine, name)]
    return {optimizer.num_steps.item() for optimizer in filter(None, optimizers)}


def _train_through_bad_steps(engine_configs: dict) -> dict:
    """By engine and option: the bad norms, whether the state stayed, AdamW's counts after 4 good and 3 bad steps."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, option in itertools.product(engine_configs, ("float32", "bf16", "muon")):
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
