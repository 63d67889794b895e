"""What each engine's states take and what a block keeps: as computed by hand, and as another way of counting sees it.

tests/benchmarks/test_collectives.py counts the states.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gmlp_scale.engine import Fsdp2Config, SingleConfig, ZeroConfig
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from gmlp_scale.models import GmlpConfig, build_model
from gmlp_scale.plan.rank_bytes import activation_bytes_per_token, state_bytes
from tests.models.every_kind import KINDS, tiny_config

NUM_BLOCKS = 12
ADAMW = AdamwConfig()
N, D, F = 48, 64, 256
SIZES = {"num_blocks": 3, "d_model": D, "d_ffn": F, "sequence_length": N, "vocab_size": 100}
# Relative positions keep one bias for all rows, which a difference between two numbers of rows does not see.
MODELS = {kind: tiny_config(kind, **SIZES) for kind in KINDS if kind != "bert-relative"}
MODELS["avey"] = tiny_config("avey", **SIZES | {"num_blocks": 4})  # as many static as dynamic layers


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
        (Fsdp2Config(), 8, [2, 4 / 8, 4 / 8, 8 / 8]),
    ],
    ids=str,
)
def test_bytes_per_parameter_in_bf16(engine, world_size, wanted):
    of_vectors = [4, 4, 0, 8]  # on every rank, and their own masters
    expected = [(P - V) * size + V * of_a_vector for size, of_a_vector in zip(wanted, of_vectors, strict=True)]
    assert states(engine, "bf16", world_size) == pytest.approx(expected)


def test_in_float32_the_parameters_are_the_masters_but_fsdp2_gathers_them_beside():
    assert states(ZeroConfig(stage=2), "float32", 4) == [4 * P, P, 0, 2 * P]
    assert states(Fsdp2Config(), "float32", 4) == [4 * P, P, P, 2 * P]


def test_fsdp2_holds_gradients_whole_while_it_accumulates_and_frees_parameters_only_where_it_reshards():
    assert states(Fsdp2Config(), "bf16", 8, accumulates=True)[1] == 4 * P
    assert states(ZeroConfig(stage=2), "bf16", 8, accumulates=True)[1] == 4 * (P - V) / 8 + 4 * V
    assert states(Fsdp2Config(), "bf16", 8)[1] == 4 * V + 4 * (P - V) / 8
    all_blocks = Fsdp2Config(blocks_per_group=NUM_BLOCKS, reshard_after_forward=True)
    assert states(all_blocks, "bf16", 1)[1] == 4 * V + (4 - 2) * (P - V)
    assert states(all_blocks, "bf16", 8)[1] == 4 * V


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


class AllocatedByOperations(TorchDispatchMode):
    """Sees the results of the operations beneath torch's functions, statistics and copies among them."""

    def __init__(self):
        super().__init__()
        self.sizes = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result


def _kept_by_operations(config, recompute: str) -> float:
    model = build_model(config)
    model.set_recompute(recompute)
    kept = []
    for num_rows in (1, 2):
        x_BND = torch.zeros(num_rows, N, D, requires_grad=True)
        with AllocatedByOperations() as seen:
            output_BND = x_BND
            for block in model.blocks:
                output_BND = block(output_BND)
        kept.append(sum(size for storage, size in seen.sizes.items() if not storage.expired()))
        del output_BND
    return (kept[1] - kept[0]) / N


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_count_is_that_of_the_operations(model, recompute):
    counted = activation_bytes_per_token(MODELS[model], "float32", recompute)
    seen = _kept_by_operations(MODELS[model], recompute)
    # Statistics of LayerNorms and softmaxes, and copies of transposed operands, two or three of D numbers each; an
    # RMSNorm keeps D numbers, on a CPU
    keeps_more = model in ("mixer", "bert-relative-only", "mlp-attention", "modern-rms") or model.startswith("avey")
    unseen_floats = 4 * D if keeps_more else 16
    assert counted <= seen <= counted + MODELS[model].num_blocks * 4 * unseen_floats


def test_gmlp_keeps_what_its_equations_say():
    kept = {r: activation_bytes_per_token(MODELS["gmlp"], "bf16", r) for r in ("none", "selective", "full")}
    # x, y; z before and after GELU; of half the width: LayerNorm(z2), u times the gate
    in_bf16 = 2 * D + 2 * F + 2 * F / 2
    in_float32 = D + F / 2 + F / 2  # what the LayerNorms take, and the gate
    assert kept["none"] == 3 * (2 * in_bf16 + 4 * in_float32)
    assert kept["selective"] == 3 * 2 * (2 * D + F + F / 2)  # x and the three products
    assert kept["full"] == 3 * 2 * D  # x


@pytest.mark.parametrize("model", MODELS)
def test_more_is_kept_where_less_is_computed_again(model):
    full, selective, none = (
        activation_bytes_per_token(MODELS[model], "bf16", r) for r in ("full", "selective", "none")
    )
    assert full < 0.9 * selective and selective < 0.9 * none
