"""Every kernel compiles for sm_90. That needs no GPU, and finds mistakes that the interpreter cannot see."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gmlp_scale.kernels import gate, layer_norm, spatial_weight

SHARED_MEMORY_BYTES = 227 * 1024
"""The most that a block of threads may have on an H100 or H200."""
ALWAYS_FLOAT32 = {"mean_T", "rstd_T", "grads_P2G", "grad_bias_T", "parts_PNN", "grad_offsets"}
SIZES = {"num_positions", "n", "d_gate", "d_attn"}
COUNTS = {"num_tokens", "blocks_per_part", "batch_size", "sequences_per_part", "num_parts"}
ATTENTION = ("context_BNK", "out_weight_GK", "out_bias_G")

FULL_WIDTH = layer_norm.full_width(1536)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def kernels(dtype: torch.dtype) -> dict[str, tuple[triton.JITFunction, dict]]:
    """By name, with the options of its launch; those that are parameters of the kernel are constants of it."""
    product = gate.TILES[dtype]
    gradient = {"BLOCK_I": product["BLOCK_N"], "BLOCK_J": product["BLOCK_G"]} | {
        name: value for name, value in product.items() if name not in ("BLOCK_N", "BLOCK_G")
    }
    one_sequence = {"batch_size": 1, "sequences_per_part": 1}  # Triton makes constants of ones
    return {
        "gate forward": (gate._spatial_gate_kernel, product | dict.fromkeys(ATTENTION)),
        "gate forward with attention": (gate._spatial_gate_kernel, product),
        "gate forward in inference": (gate._spatial_gate_kernel, product | dict.fromkeys((*ATTENTION, "gate_BNG"))),
        "gate backward": (gate._spatial_gate_backward_kernel, FULL_WIDTH),
        "norm forward": (layer_norm._layer_norm_of_gelu_kernel, FULL_WIDTH),
        "norm backward": (layer_norm._layer_norm_of_gelu_backward_kernel, FULL_WIDTH),
        "weight from offsets": (spatial_weight._spatial_weight_kernel, layer_norm.full_width(512)),
        "weight gradient": (spatial_weight._spatial_weight_gradient_kernel, gradient),
        "weight gradient of one sequence": (spatial_weight._spatial_weight_gradient_kernel, gradient | one_sequence),
        "diagonal sums": (spatial_weight._spatial_diagonals_kernel, {"BLOCK_I": 512, "BLOCK_D": 8}),
    }


CASES = [(name, BFLOAT16, 16) for name in kernels(BFLOAT16)] + [
    ("gate forward with attention", FLOAT32, 16),
    ("weight gradient", FLOAT32, 16),
    ("gate forward with attention", BFLOAT16, 1),
    ("norm backward", BFLOAT16, 1),
    ("weight gradient", BFLOAT16, 1),
    ("weight gradient", FLOAT32, 1),
]


def compiled(kernel: triton.JITFunction, options: dict, dtype: torch.dtype, divisor: int):
    """For sizes that `divisor`, 16 or 1, divides."""
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    of_dtype = "*bf16" if dtype == BFLOAT16 else "*fp32"
    pointers = {name: "*fp32" if name in ALWAYS_FLOAT32 else of_dtype for name in names}
    numbers = {name: "i32" for name in SIZES | COUNTS} | {"eps": "fp32"}
    signature = {name: "constexpr" if name in constants else numbers.get(name, pointers[name]) for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or (divisor == 16 and name in SIZES)
        },
    )
    launch = {name: value for name, value in options.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


@pytest.mark.parametrize("name, dtype, divisor", CASES, ids=str)
def test_kernel_compiles_and_fits(name, dtype, divisor):
    result = compiled(*kernels(dtype)[name], dtype, divisor)
    assert result.metadata.shared <= SHARED_MEMORY_BYTES
    is_on_tensor_cores = name.startswith(("gate forward", "weight gradient")) and dtype == BFLOAT16
    assert ("wgmma.mma_async" in result.asm["ptx"]) == is_on_tensor_cores
