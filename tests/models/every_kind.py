"""The one table of models for tests: a small model of every kind, and batches for them."""

from typing import TypeVar

import torch
from pydantic import TypeAdapter

from gmlp_scale.data.batch import IGNORED, NUM_SPECIAL_TOKENS, MaskedBatch
from gmlp_scale.models import ModelConfig, build_model

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)
SIZES = {"num_blocks": 2, "d_model": 16, "d_ffn": 32, "sequence_length": 12, "vocab_size": 40}
TINY = SIZES | {"masks_padding": True}
"""What all of them have in common. They mask padding, as new models do."""
KINDS = {  # every block family, and every variant of a block
    "gmlp": {"kind": "gmlp"},
    "gmlp-dense": {"kind": "gmlp", "spatial": "dense"},
    "gmlp-dynamic": {"kind": "gmlp", "spatial": "dynamic_toeplitz"},
    "gmlp-linear": {"kind": "gmlp", "gating": "linear"},
    "gmlp-additive-bypass": {"kind": "gmlp", "gating": "additive", "mixed_share": 0.5},
    "gmlp-multiplicative": {"kind": "gmlp", "gating": "multiplicative"},
    "amlp": {"kind": "amlp", "d_attn": 8},
    "bert-relative": {"kind": "transformer", "num_heads": 2, "positions": "relative"},
    "bert-absolute": {"kind": "transformer", "num_heads": 2, "positions": "absolute"},
    "bert-relative-only": {"kind": "transformer", "num_heads": 2, "positions": "relative_only"},
    "mlp-attention": {"kind": "mlp_attention", "num_heads": 2, "d_scores": 6},
    "dot-product": {"kind": "mlp_attention", "num_heads": 2, "scores": "dot_product"},
    "mixer": {"kind": "mixer", "d_spatial": 10},
    "modern": {"kind": "modern_transformer", "num_heads": 2, "window": 6},
    "modern-rms": {"kind": "modern_transformer", "num_heads": 2, "window": None, "norm": "rms_norm"},
    "avey": {"kind": "avey"},
    "avey-static": {"kind": "avey", "layers": "static", "spatial": "toeplitz", "mixed_share": 1.0},
    "avey-dynamic": {"kind": "avey", "layers": "dynamic"},
    "avey-ranked": {"kind": "avey", "chunk_length": 3, "ranked_chunks": 2},
}
FAMILIES = list({fields["kind"]: kind for kind, fields in reversed(KINDS.items())}.values())
"""The first kind of each block family."""


def tiny_config(kind: str, **changes) -> ModelConfig:
    return TypeAdapter(ModelConfig).validate_python(TINY | KINDS[kind] | changes)


TRANSFORMERS = [kind for kind, fields in KINDS.items() if fields["kind"] == "transformer"]
CAUSAL = ["mlp-attention", "dot-product", "gmlp", "gmlp-dense", "gmlp-dynamic", "gmlp-linear", "amlp"]
READS_PADDING = [kind for kind, fields in KINDS.items() if fields["kind"] in ("gmlp", "amlp", "mixer")]
"""Models of these kinds read <pad> like a token, if they were made before `masks_padding`."""


def tiny_model(kind: str, *, seed: int = 0, **changes):
    return build_model(tiny_config(kind, **changes), seed=seed)


def perturb(module: AnyModule, scale: float = 0.3) -> AnyModule:
    """The module, with every parameter moved off its initial value, gains and biases included."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def check_gradients(block: torch.nn.Module, d_model: int) -> None:
    """Compares the gradients of a float64 block's input and parameters with finite differences."""
    names = [name for name, _ in block.named_parameters()]
    x_BND = torch.randn(2, 3, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def run(x_BND, *parameters):
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x_BND,))

    assert torch.autograd.gradcheck(run, (x_BND.requires_grad_(), *block.parameters()))


def random_batch(num_rows: int = 4, num_positions: int = 12, vocab_size: int = 40) -> MaskedBatch:
    """Each row has three masked positions; the second row leaves its last one unused."""
    generator = torch.Generator().manual_seed(2)
    token_ids_BN = torch.randint(NUM_SPECIAL_TOKENS, vocab_size, (num_rows, num_positions), generator=generator)
    positions = [torch.randperm(num_positions, generator=generator)[:3].sort().values for _ in range(num_rows)]
    labels_BM = torch.randint(NUM_SPECIAL_TOKENS, vocab_size, (num_rows, 3), generator=generator)
    labels_BM[1, -1] = IGNORED
    return MaskedBatch(token_ids_BN, torch.stack(positions), labels_BM)
