"""The kernels' own compilation for sm_90, which needs no GPU: what the interpreter cannot see."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gmlp_scale.kernels import gate, layer_norm, spatial_weight

SHARED_MEMORY_BYTES = 227 * 1024
"""That a block of threads may have on an H100 or H200."""
FLOAT32 = {"mean_R", "rstd_R", "grads_P2G", "grad_bias_R", "parts_PNN", "grad_offsets"}
SIZES = {"num_positions", "n", "d_gate", "d_attn"}
COUNTS = {"num_rows", "blocks_per_part", "batch_size", "sequences_per_part", "num_parts"}
ATTENTION = ("context_BNK", "out_weight_GK", "out_bias_G")

[PRODUCT] = [tiles for dtype, tiles in gate.TILES.items() if dtype.itemsize == 2]
ROWS = layer_norm.whole_rows(1536)
GRADIENT = {"BLOCK_I": PRODUCT["BLOCK_N"], "BLOCK_J": PRODUCT["BLOCK_G"]} | {
    name: value for name, value in PRODUCT.items() if name not in ("BLOCK_N", "BLOCK_G")
}
KERNELS = {
    "gate forward": (gate._spatial_gate_kernel, PRODUCT | dict.fromkeys(ATTENTION)),
    "gate forward with attention": (gate._spatial_gate_kernel, PRODUCT),
    "gate forward in inference": (gate._spatial_gate_kernel, PRODUCT | dict.fromkeys((*ATTENTION, "gate_BNG"))),
    "gate backward": (gate._spatial_gate_backward_kernel, ROWS),
    "norm forward": (layer_norm._layer_norm_of_gelu_kernel, ROWS),
    "norm backward": (layer_norm._layer_norm_of_gelu_backward_kernel, ROWS),
    "weight from offsets": (spatial_weight._spatial_weight_kernel, layer_norm.whole_rows(512)),
    "weight gradient": (spatial_weight._spatial_weight_gradient_kernel, GRADIENT),
    "diagonal sums": (spatial_weight._spatial_diagonals_kernel, {"BLOCK_I": 512, "BLOCK_D": 8}),
}


def compiled(kernel: triton.JITFunction, options: dict):
    """For bfloat16 and sizes that 16 divides. An option that is a parameter of the kernel is a constant of it."""
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    pointers = {name: "*fp32" if name in FLOAT32 else "*bf16" for name in names}
    numbers = {name: "i32" for name in SIZES | COUNTS} | {"eps": "fp32"}
    signature = {name: "constexpr" if name in constants else numbers.get(name, pointers[name]) for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or name in SIZES
        },
    )
    launch = {name: value for name, value in options.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_and_fits(name):
    result = compiled(*KERNELS[name])
    assert result.metadata.shared <= SHARED_MEMORY_BYTES
    is_product = name.startswith(("gate forward", "weight gradient"))
    assert ("wgmma.mma_async" in result.asm["ptx"]) == is_product  # on the tensor cores
