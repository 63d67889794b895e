"""The spatial weight W: kernels that build it from its offsets, and that sum its gradient over the batch."""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.layer_norm import num_multiprocessors

TILES = {
    torch.bfloat16: {"BLOCK_I": 128, "BLOCK_J": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    torch.float32: {"BLOCK_I": 64, "BLOCK_J": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
}
"""The tiles of the gradient's product: rows x columns of W, and how many channels are loaded at once."""


def spatial_matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """W itself, or W[i, j] = weight[(n - 1) + (j - i)] from the 2n - 1 offsets, in `dtype`."""
    weight = weight.contiguous()
    if weight.ndim == 2:
        return weight.to(dtype)
    n = (len(weight) + 1) // 2
    weight_NN = weight.new_empty(n, n, dtype=dtype)
    columns = triton.next_power_of_2(n)
    rows = max(2048 // columns, 1)
    _spatial_weight_kernel[(ceil(n / rows),)](weight, weight_NN, n, BLOCK_I=rows, BLOCK_J=columns, num_warps=8)
    return weight_NN


def spatial_weight_gradient(grad_gate_BNG: Tensor, v_BNG: Tensor, like: Tensor) -> Tensor:
    """sum_b grad_b v_b^T in float32, [n, n]; summed over its diagonals to [2n - 1] if `like` holds offsets."""
    batch_size, n, d_gate = v_BNG.shape
    tiles = TILES[v_BNG.dtype]
    num_tiles = ceil(n / tiles["BLOCK_I"]) * ceil(n / tiles["BLOCK_J"])
    num_blocks = batch_size * ceil(d_gate / tiles["BLOCK_K"])
    # The sum over sequences and channels is cut into parts, so that each multiprocessor has a tile of one.
    blocks_per_part = ceil(num_blocks / max(num_multiprocessors(v_BNG.device) // num_tiles, 1))
    num_parts = ceil(num_blocks / blocks_per_part)
    parts_PNN = v_BNG.new_empty(num_parts, n, n, dtype=torch.float32)
    grid = (ceil(n / tiles["BLOCK_I"]), ceil(n / tiles["BLOCK_J"]), num_parts)
    _spatial_weight_gradient_kernel[grid](
        grad_gate_BNG, v_BNG, parts_PNN, num_blocks, blocks_per_part, n, d_gate, **tiles
    )
    grad_NN = parts_PNN.sum(0)
    if like.ndim == 2:
        return grad_NN
    grad_offsets = grad_NN.new_empty(2 * n - 1)
    # Eight neighbouring diagonals in float32 are 32 bytes, the least that a GPU reads at once.
    block = {"BLOCK_I": min(triton.next_power_of_2(n), 512), "BLOCK_D": 8}
    _spatial_diagonals_kernel[(ceil((2 * n - 1) / 8),)](grad_NN, grad_offsets, n, **block)
    return grad_offsets


@triton.jit
def _spatial_weight_kernel(offsets, weight_NN, n, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    i = (tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I))[:, None]
    j = tl.arange(0, BLOCK_J)[None, :]
    inside = (i < n) & (j < n)
    tl.store(weight_NN + i * n + j, tl.load(offsets + (n - 1) + (j - i), mask=inside), mask=inside)


@triton.jit
def _spatial_weight_gradient_kernel(
    grad_gate_BNG, v_BNG, parts_PNN, num_blocks, blocks_per_part, n, d_gate,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    part = tl.program_id(2)
    first = part * blocks_per_part
    blocks_per_sequence = tl.cdiv(d_gate, BLOCK_K)
    total = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    # One loop over sequences and channels, so that the next loads start early even where a sequence ends.
    for index in range(first, tl.minimum(first + blocks_per_part, num_blocks)):
        first_token = (index // blocks_per_sequence).to(tl.int64) * n
        channel = (index % blocks_per_sequence) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_channel = channel < d_gate
        grad_gate = tl.load(
            grad_gate_BNG + first_token * d_gate + i[:, None] * d_gate + channel[None, :],
            mask=(i < n)[:, None] & is_channel[None, :],
            other=0.0,
        )
        v = tl.load(
            v_BNG + first_token * d_gate + j[None, :] * d_gate + channel[:, None],
            mask=(j < n)[None, :] & is_channel[:, None],
            other=0.0,
        )
        total = tl.dot(grad_gate, v, total, input_precision="ieee")
    place = parts_PNN + part.to(tl.int64) * n * n + i[:, None] * n + j[None, :]
    tl.store(place, total, mask=(i < n)[:, None] & (j < n)[None, :])


@triton.jit
def _spatial_diagonals_kernel(grad_NN, grad_offsets, n, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offset d is the diagonal j - i = d - (n - 1)."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for start in range(0, n, BLOCK_I):
        i = (start + tl.arange(0, BLOCK_I))[:, None]
        j = i + d[None, :] - (n - 1)
        total += tl.load(grad_NN + i * n + j, mask=(i < n) & (j >= 0) & (j < n), other=0.0)
    tl.store(grad_offsets + d, tl.sum(total, axis=0), mask=d < 2 * n - 1)
