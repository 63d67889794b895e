"""The gate: one kernel for the spatial product, the bias, the tiny attention and the product with GELU(u), and one for
its backward pass."""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.layer_norm import backward_launch, gelu_and_slope

BFLOAT16_TILES = [
    {
        "BLOCK_N": 128,
        "BLOCK_G": num_channels,
        "BLOCK_K": 64,
        "USES_TMA": uses_tma,
        "num_warps": num_warps,
        "num_stages": 3,
    }
    for uses_tma in (False, True)
    for num_channels, num_warps in ((64, 4), (128, 8))
]
"""Tiles of the product: positions x channels of the output, and how much of the sum is loaded at once. The first is the
default. With 64 channels a multiprocessor holds three programs, so that one's GELU overlaps another's product; 128
channels read less. BLOCK_K is the same in all, and so is the order of every sum."""
FLOAT32_TILE = {"BLOCK_N": 64, "BLOCK_G": 64, "BLOCK_K": 32, "USES_TMA": False, "num_warps": 4, "num_stages": 2}


def apply_gate(
    z_BNF: Tensor,
    v_BNG: Tensor,
    weight_NN: Tensor,
    bias_N: Tensor,
    context_BNK: Tensor | None,
    out_weight_GK: Tensor | None,
    out_bias_G: Tensor | None,
    keeps_gate: bool,
) -> tuple[Tensor, Tensor]:
    """Returns (gelu(u) * S, S) for S = [W | C] [v ; W_o^T] + b + b_o, u the first half of z. S is empty unless kept."""
    batch_size, num_positions, d_gate = v_BNG.shape
    output_BNG = torch.empty_like(v_BNG)
    gate_BNG = torch.empty_like(v_BNG) if keeps_gate else v_BNG.new_empty(0)
    d_attn = 0 if context_BNK is None else context_BNK.shape[-1]
    kernel, tile = _spatial_gate_kernel, BFLOAT16_TILES[0] if z_BNF.dtype == torch.bfloat16 else FLOAT32_TILE
    if is_tuned(z_BNF, v_BNG, weight_NN, *([] if context_BNK is None else [context_BNK, out_weight_GK])):
        kernel, tile = _tuned_spatial_gate_kernel, {}
    triton.set_allocator(_scratch_memory)  # for this thread: recomputation runs in another

    def grid(tile: dict[str, int]) -> tuple[int, int, int]:
        return ceil(num_positions / tile["BLOCK_N"]), ceil(d_gate / tile["BLOCK_G"]), batch_size

    kernel[grid](
        z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G,
        gate_BNG if keeps_gate else None, output_BNG, num_positions, d_gate, d_attn, **tile,
    )  # fmt: skip
    return output_BNG, gate_BNG


def is_tuned(*matrices: Tensor) -> bool:
    """Whether the first call for these shapes tries all tiles and keeps the fastest, on disk too.

    Only whole blocks are tuned, as trained models have: a text of any length would start another trial. TMA needs rows
    that begin at multiples of 16 bytes, which an engine's weights in one flat buffer may not.
    """
    return not triton.knobs.runtime.interpret and all(
        matrix.dtype == torch.bfloat16
        and matrix.data_ptr() % 16 == 0
        and matrix.shape[-1] % 64 == matrix.shape[-2] % 64 == 0
        for matrix in matrices
    )


def _scratch_memory(num_bytes: int, alignment: int, stream: int | None) -> Tensor:
    """Where programs write the descriptors of their matrices."""
    return torch.empty(num_bytes, dtype=torch.int8, device="cuda")


def apply_gate_backward(
    grad_output_BNG: Tensor, z_BNF: Tensor, gate_BNG: Tensor, grad_z_BNF: Tensor, grads_P4G: Tensor
) -> tuple[Tensor, Tensor]:
    """Fills the first half of grad_z, and in grads_P4G the sums over it. Returns the gradients of S, and of b for each
    sequence in float32."""
    grad_gate_BNG = torch.empty_like(gate_BNG)
    grad_bias_BN = gate_BNG.new_empty(gate_BNG.shape[:2], dtype=torch.float32)
    num_tokens, d_gate = grad_bias_BN.numel(), gate_BNG.shape[-1]
    _spatial_gate_backward_kernel[(len(grads_P4G),)](
        grad_output_BNG, z_BNF, gate_BNG, grad_z_BNF, grad_gate_BNG, grad_bias_BN, grads_P4G,
        num_tokens, d_gate, **backward_launch(num_tokens, d_gate, z_BNF.device)[1],
    )  # fmt: skip
    return grad_gate_BNG, grad_bias_BN


@triton.jit
def _matrix(pointer, num_rows, num_columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USES_TMA: tl.constexpr):
    """A row-major matrix for _load and _store, in blocks of ROWS x COLUMNS: its descriptor for TMA, or its pointer."""
    if USES_TMA:
        return tl.make_tensor_descriptor(pointer, [num_rows, num_columns], [stride, 1], [ROWS, COLUMNS])
    else:
        return pointer


@triton.jit
def _load(
    matrix, row, column, num_rows, num_columns, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    """The block that begins at (row, column), zero outside the matrix."""
    if USES_TMA:
        return matrix.load([row, column])
    else:
        rows, columns = (row + tl.arange(0, ROWS))[:, None], (column + tl.arange(0, COLUMNS))[None, :]
        return tl.load(matrix + rows * stride + columns, mask=(rows < num_rows) & (columns < num_columns), other=0.0)


@triton.jit
def _store(
    matrix, block, row, column, num_rows, num_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    if USES_TMA:
        matrix.store([row, column], block.to(matrix.dtype))
    else:
        rows, columns = (row + tl.arange(0, ROWS))[:, None], (column + tl.arange(0, COLUMNS))[None, :]
        place = rows * num_columns + columns
        tl.store(matrix + place, block, mask=(rows < num_rows) & (columns < num_columns))


@triton.jit
def _spatial_gate_kernel(
    z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G, gate_BNG, output_BNG,
    num_positions, d_gate, d_attn,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, USES_TMA: tl.constexpr,
):  # fmt: skip
    n, g, k = num_positions, d_gate, d_attn
    row, column = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_G
    # 64 bits address a sequence and 32 bits an element within it, which takes half the registers.
    first_token = tl.program_id(2).to(tl.int64) * n

    gate = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    weight_NN = _matrix(weight_NN, n, n, n, BLOCK_N, BLOCK_K, USES_TMA)
    v_NG = _matrix(v_BNG + first_token * g, n, g, g, BLOCK_K, BLOCK_G, USES_TMA)
    for start in range(0, n, BLOCK_K):
        weight = _load(weight_NN, row, start, n, n, n, BLOCK_N, BLOCK_K, USES_TMA)
        v = _load(v_NG, start, column, n, g, g, BLOCK_K, BLOCK_G, USES_TMA)
        gate = tl.dot(weight, v, gate, input_precision="ieee")
    channel, position = column + tl.arange(0, BLOCK_G), row + tl.arange(0, BLOCK_N)
    if context_BNK is not None:  # more of the same sum
        context_NK = _matrix(context_BNK + first_token * k, n, k, k, BLOCK_N, BLOCK_K, USES_TMA)
        out_weight_GK = _matrix(out_weight_GK, g, k, k, BLOCK_G, BLOCK_K, USES_TMA)
        for start in range(0, k, BLOCK_K):
            context = _load(context_NK, row, start, n, k, k, BLOCK_N, BLOCK_K, USES_TMA)
            out_weight = _load(out_weight_GK, column, start, g, k, k, BLOCK_G, BLOCK_K, USES_TMA)
            gate = tl.dot(context, out_weight.T, gate, input_precision="ieee")
        gate += tl.load(out_bias_G + channel, mask=channel < g, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias_N + position, mask=position < n, other=0.0).to(tl.float32)[:, None]

    if gate_BNG is not None:
        gate_NG = _matrix(gate_BNG + first_token * g, n, g, g, BLOCK_N, BLOCK_G, USES_TMA)
        _store(gate_NG, gate, row, column, n, g, BLOCK_N, BLOCK_G, USES_TMA)
    u_NG = _matrix(z_BNF + first_token * (2 * g), n, g, 2 * g, BLOCK_N, BLOCK_G, USES_TMA)
    u = _load(u_NG, row, column, n, g, 2 * g, BLOCK_N, BLOCK_G, USES_TMA).to(tl.float32)
    output_NG = _matrix(output_BNG + first_token * g, n, g, g, BLOCK_N, BLOCK_G, USES_TMA)
    hidden, _ = gelu_and_slope(u)
    _store(output_NG, hidden * gate, row, column, n, g, BLOCK_N, BLOCK_G, USES_TMA)


_tuned_spatial_gate_kernel = triton.autotune(
    [
        triton.Config(
            {name: value for name, value in tile.items() if name.isupper()}, tile["num_warps"], tile["num_stages"]
        )
        for tile in BFLOAT16_TILES
    ],
    key=["num_positions", "d_gate", "d_attn"],
    cache_results=True,
)(_spatial_gate_kernel)


@triton.jit
def _spatial_gate_backward_kernel(
    grad_output_TG, z_TF, gate_TG, grad_z_TF, grad_gate_TG, grad_bias_T, grads_P4G, num_tokens, d_gate, blocks_per_part,
    BLOCK_T: tl.constexpr, CHUNK_G: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    zeros = tl.zeros((BLOCK_T, CHUNK_G), tl.float32)
    sums = (zeros,) * NUM_CHUNKS
    for block in tl.range(blocks_per_part, num_stages=NUM_STAGES):  # loads the next tokens early
        token = (part * blocks_per_part + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        new_sums, grad_bias = (), zeros
        for index in tl.static_range(NUM_CHUNKS):
            channel = index * CHUNK_G + tl.arange(0, CHUNK_G)[None, :]
            inside = (token < num_tokens)[:, None] & (channel < d_gate)
            place, place_in_z = token[:, None] * d_gate + channel, 2 * token[:, None] * d_gate + channel
            grad_output = tl.load(grad_output_TG + place, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_TG + place, mask=inside, other=0.0).to(tl.float32)
            u = tl.load(z_TF + place_in_z, mask=inside, other=0.0).to(tl.float32)
            hidden, slope = gelu_and_slope(u)
            grad_gate, grad_u = grad_output * hidden, grad_output * gate * slope
            tl.store(grad_gate_TG + place, grad_gate, mask=inside)
            tl.store(grad_z_TF + place_in_z, grad_u, mask=inside)
            grad_bias += grad_gate
            new_sums += (sums[index] + grad_u,)
        sums = new_sums
        tl.store(grad_bias_T + token, tl.sum(grad_bias, axis=1), mask=token < num_tokens)
    for index in tl.static_range(NUM_CHUNKS):
        channel = index * CHUNK_G + tl.arange(0, CHUNK_G)
        tl.store(grads_P4G + 4 * part * d_gate + channel, tl.sum(sums[index], axis=0), mask=channel < d_gate)
