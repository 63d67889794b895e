"""What a block keeps for the backward pass: as computed by hand, as another way of counting sees it, and in order."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gmlp_scale.models import build_model
from gmlp_scale.plan.activations import activation_bytes_per_token
from tests.models.every_kind import KINDS, tiny_config

N, D, F = 48, 64, 256
SIZES = {"num_blocks": 3, "d_model": D, "d_ffn": F, "sequence_length": N, "vocab_size": 100}
# Relative positions keep one bias for all rows, which a difference between two numbers of rows does not see.
MODELS = {kind: tiny_config(kind, **SIZES) for kind in KINDS if kind != "bert-relative"}


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
            output_BND = model.blocks[0](x_BND)
        kept.append(sum(size for storage, size in seen.sizes.items() if not storage.expired()))
        del output_BND
    return config.num_blocks * (kept[1] - kept[0]) / N


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_count_is_that_of_the_operations(model, recompute):
    counted = activation_bytes_per_token(MODELS[model], "float32", recompute)
    seen = _kept_by_operations(MODELS[model], recompute)
    # Statistics of LayerNorms and softmaxes, and copies of transposed operands, two or three of D numbers each
    unseen_floats = 4 * D if model in ("mixer", "bert-relative-only", "mlp-attention") else 16
    assert counted <= seen <= counted + SIZES["num_blocks"] * 4 * unseen_floats


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
