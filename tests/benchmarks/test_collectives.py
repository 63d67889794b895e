"""Bytes that every engine's collectives carry in a step, and its peak memory, as counted and as its plan says."""

import pytest

from benchmarks import count_collectives
from benchmarks.count_collectives import measure_ranks, sixteen_bytes_model, union_length
from benchmarks.reports import table
from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import ENGINES, SHARDED_ENGINES, Fsdp2Config, ZeroConfig
from gmlp_scale.engine.optimizer import MuonConfig
from gmlp_scale.plan.describe import meta_model
from gmlp_scale.plan.rank_bytes import COLLECTIVES, carried_bytes, state_bytes
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.trial import ByteCounts, count_fake_step, count_step
from tests.gloo_ranks import run_ranks
from tests.whole_runs import SMOKE

# Most matrices have more than the 100,000 elements up to which ZeRO-3 keeps them gathered. Rows are short, so that
# states count and activations do not.
RUN = load_run_config(
    SMOKE,
    [
        "model.num_blocks=4", "model.d_model=256", "model.d_ffn=1024", "model.sequence_length=16",
        "train.micro_batch_size=1", "train.precision=bf16",
    ],
)  # fmt: skip
FLOAT32 = RUN.with_train(precision="float32")
ADAMW, MUON = RUN.optimizer, MuonConfig(**RUN.optimizer.model_dump(exclude={"kind"}))


def _engines(world_size: int) -> dict:
    """FSDP2 with several groups, as large models have."""
    return {
        name: engine.model_copy(update={"blocks_per_group": 2}) if isinstance(engine, Fsdp2Config) else engine
        for name, engine in (ENGINES if world_size == 1 else SHARDED_ENGINES).items()
    }


def _counts(counts: ByteCounts) -> tuple[dict, int]:
    return {kind: counts.carried[kind] for kind in COLLECTIVES}, counts.peak


def _count_each(cases: list[tuple]) -> dict:
    with start_world(60, "cpu", init_group=True) as world:
        return {
            (name, num, optimizer): _counts(
                count_step(RUN.model_copy(update={"optimizer": optimizer}), engine, world, num)
            )
            for name, engine in _engines(world.size).items()
            for num, optimizer in cases
        }


@pytest.mark.parametrize(
    "world_size, cases",
    [(1, [(1, ADAMW), (1, MUON)]), (2, [(1, ADAMW), (2, ADAMW), (2, MUON)]), (4, [(1, ADAMW), (1, MUON)])],
)
def test_every_engine_carries_and_holds_what_its_plan_says(world_size, cases):
    model, precision, engines = meta_model(RUN), RUN.train.precision, _engines(world_size)
    ranks = run_ranks(_count_each, world_size, cases)
    for case, (found, _) in ranks[0].items():
        name, num, optimizer = case
        wanted = carried_bytes(engines[name], model, optimizer, precision, num, world_size)
        if world_size > 1:
            assert found == pytest.approx(wanted, rel=0.02, abs=0.02 * max(wanted.values())), case
        states = state_bytes(engines[name], model, optimizer, precision, world_size, accumulates=num > 1)
        peak = max(counted[case][1] for counted in ranks)
        # Within 10 % on a calm machine; on a busy one gloo's threads free their buffers later (12 % seen).
        assert sum(states.values()) == pytest.approx(peak, rel=0.2), (case, states)


def _count_in_float32(name: str) -> dict[str, float]:
    with start_world(60, "cpu", init_group=True) as world:
        return _counts(count_step(FLOAT32, ENGINES[name], world, 1))[0]


def test_in_float32_stage_1_reduces_to_owners():
    """In bf16 it all-reduces, which is twice the bytes."""
    found = run_ranks(_count_in_float32, 2, "zero, stage 1")[0]
    wanted = carried_bytes(ENGINES["zero, stage 1"], meta_model(FLOAT32), FLOAT32.optimizer, "float32", 1, 2)
    assert found == pytest.approx(wanted, rel=0.02, abs=1000)


def test_the_launcher_needs_a_number_of_rows(launched):
    words = ["--config", SMOKE, "train.micro_batch_size=auto", "train.device=auto"]
    code, _, error = launched(count_collectives.main, *words)
    assert code == 2 and "train.micro_batch_size: found auto; needed: a number" in error


def test_fake_ranks_carry_and_hold_what_the_plan_says():
    """On more ranks the padding of these small matrices would count. The plan is up to a quarter
    above what the fake process holds; why, is not known (docs/LOG.md)."""
    engine, precision = _engines(64)["fsdp2"], RUN.train.precision
    run = RUN.model_copy(update={"engine": engine, "model": RUN.model.model_copy(update={"num_blocks": 8})})
    model = meta_model(run)
    found, peak = _counts(count_fake_step(run, 64))
    assert found == pytest.approx(carried_bytes(engine, model, ADAMW, precision, 1, 64), rel=0.02)
    assert 0.75 < peak / sum(state_bytes(engine, model, ADAMW, precision, 64, accumulates=False).values()) < 1


SCALED = ["model.num_blocks=8", "model.d_model=128", "model.d_ffn=512", "model.sequence_length=16"]


def _measure() -> dict:
    count_collectives.SHARDED_ENGINES = {name: SHARDED_ENGINES[name] for name in ("fsdp2", "zero, stage 3")}
    return measure_ranks(str(SMOKE), [*SCALED, "train.micro_batch_size=1", "train.recompute=selective"], 1, 0.0)


def test_ranks_are_measured_and_shown():
    measured = run_ranks(_measure, 2)[0]
    refused = measured["engines"]["zero, stage 3"]["not run"]
    assert refused[0].startswith("train.recompute: found selective; needed: none or full with engine.stage=3")
    figures = measured["engines"]["fsdp2"]
    assert 0 < figures["communication_share"] < 1 and figures["step_seconds"] > 0
    assert figures["sent_over_formula"] == pytest.approx(1, abs=0.05)
    assert figures["sixteen_bytes_model"] == 4 + 12 / 2
    assert figures["peak_bytes_per_parameter"] == pytest.approx(figures["planned_states_per_parameter"], rel=0.5)
    shown = table({"recipes": {"smoke": {"scaling": {"2 ranks": measured}}}}).splitlines()
    assert [line.count("|") for line in shown] == [12] * 3 and shown[2].startswith("| smoke | 2 | fsdp2 | ")


@pytest.mark.parametrize(
    "engine, precision, expected",
    [
        (ZeroConfig(stage=1), "bf16", 2 + 2 + 12 / 4),
        (ZeroConfig(stage=2), "bf16", 2 + 14 / 4),
        (Fsdp2Config(), "bf16", 2 + 14 / 4),
        (Fsdp2Config(reshard_after_forward=True), "float32", 16 / 4),
    ],
)
def test_the_model_of_16_bytes(engine, precision, expected):
    assert sixteen_bytes_model(engine, precision, 4) == expected


def test_spans_that_overlap_count_once():
    assert union_length([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert union_length([]) == 0
