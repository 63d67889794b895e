"""What each engine's states take by the formulas. tests/benchmarks/test_collectives.py counts them."""

import pytest
import torch

from gmlp_scale.engine import Fsdp2Config, SingleConfig, ZeroConfig
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from gmlp_scale.models import GmlpConfig, build_model
from gmlp_scale.plan.engine_bytes import state_bytes

NUM_BLOCKS = 12
ADAMW = AdamwConfig()
with torch.device("meta"):
    MODEL = build_model(GmlpConfig(num_blocks=NUM_BLOCKS, d_model=16, d_ffn=32, sequence_length=32, vocab_size=100))
P = sum(parameter.numel() for parameter in MODEL.parameters())
V = NUM_BLOCKS * (2 * 16 + 2 * 16 + 63 + 32) + 2 * 16  # in LayerNorms, w and b; bf16 leaves them in float32
OUTSIDE = P - sum(parameter.numel() for parameter in MODEL.blocks.parameters())


def states(engine, precision: str, world_size: int, accumulates: bool = False, optimizer=ADAMW) -> list[float]:
    """Parameters, gradients, master and moments in bytes, without the buffers."""
    return list(state_bytes(engine, MODEL, optimizer, precision, world_size, accumulates=accumulates).values())[:4]


@pytest.mark.parametrize(
    "engine, world_size, wanted",
    [
        (SingleConfig(), 1, [2, 4, 4, 8]),
        (ZeroConfig(stage=1), 8, [2, 4, 4 / 8, 8 / 8]),
        (ZeroConfig(stage=2), 8, [2, 4 / 8, 4 / 8, 8 / 8]),
        (ZeroConfig(stage=3), 8, [2 + 2 / 8, 4 / 8, 4 / 8, 8 / 8]),
        (Fsdp2Config(), 8, [2, 0, 4 / 8, 8 / 8]),
    ],
    ids=str,
)
def test_bytes_per_parameter_in_bf16(engine, world_size, wanted):
    of_vectors = [4, 4, 0, 8]  # on every rank, and their own masters
    expected = [(P - V) * size + V * of_a_vector for size, of_a_vector in zip(wanted, of_vectors, strict=True)]
    assert states(engine, "bf16", world_size) == pytest.approx(expected)


def test_in_float32_the_parameters_are_the_masters_but_fsdp2_gathers_them_beside():
    assert states(ZeroConfig(stage=2), "float32", 4) == [4 * P, P, 0, 2 * P]
    assert states(Fsdp2Config(), "float32", 4) == [4 * P, 0, P, 2 * P]


def test_fsdp2_frees_gathered_parameters_while_gradients_come_and_holds_them_whole_while_it_accumulates():
    assert states(Fsdp2Config(), "bf16", 8, accumulates=True)[1] == 4 * P
    assert states(ZeroConfig(stage=2), "bf16", 8, accumulates=True)[1] == 4 * (P - V) / 8 + 4 * V
    assert states(Fsdp2Config(), "bf16", 1)[1] == 4 * V + (4 - 2) * (P - V)
    assert states(Fsdp2Config(), "bf16", 8)[1] == 4 * V


def test_fsdp2_that_reshards_gathers_two_groups_and_what_is_outside_of_blocks():
    per_block = (P - OUTSIDE - V + 2 * 16) / NUM_BLOCKS
    for blocks_per_group, num_gathered in ((1, 2), (3, 6), (8, NUM_BLOCKS)):
        engine = Fsdp2Config(blocks_per_group=blocks_per_group, reshard_after_forward=True)
        matrices_outside = OUTSIDE - 2 * 16
        assert states(engine, "bf16", 8)[0] == pytest.approx(2 * (matrices_outside + num_gathered * per_block) + 4 * V)


@pytest.mark.parametrize("engine", [SingleConfig(), ZeroConfig(stage=2), Fsdp2Config()], ids=lambda engine: engine.kind)
def test_muon_has_one_state_of_the_blocks_matrices(engine):
    world_size, in_matrices = 1 if engine.kind == "single" else 4, NUM_BLOCKS * (16 * 32 + 16 * 16)
    *others, moments = states(engine, "bf16", world_size)
    expected = [*others, moments - 4 * in_matrices / world_size]
    assert states(engine, "bf16", world_size, optimizer=MuonConfig()) == expected
