"""What more ranks cost: each figure is of what it says, not how large it is."""

import pytest

from benchmarks import scaling
from benchmarks.reports import table
from benchmarks.scaling import measure_ranks, sixteen_bytes_model, union_length
from gmlp_scale.engine import SHARDED_ENGINES, Fsdp2Config, ZeroConfig
from tests.benchmarks.smoke_recipe import SMOKE
from tests.gloo_ranks import run_ranks

RECIPE = ["model.num_blocks=8", "model.d_model=128", "model.d_ffn=512", "model.sequence_length=16"]
ENGINES = {name: SHARDED_ENGINES[name] for name in ("fsdp2", "zero, stage 3")}


def _measure() -> dict:
    scaling.SHARDED_ENGINES = ENGINES
    return measure_ranks(str(SMOKE), [*RECIPE, "train.micro_batch_size=1", "train.recompute=selective"], 1, 0.0)


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
