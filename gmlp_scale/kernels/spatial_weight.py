"""The spatial weight W: kernels that build it from its offsets, and that sum its gradient over the batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.gate import TILES
from gmlp_scale.kernels.layer_norm import full_width

NUM_PROGRAMS = 128
"""How many programs share the gradient's product, if the batch is large enough: about one for each multiprocessor of a
GPU. It is a constant, so that the sum has the same order on every device."""


def spatial_matrix(weight: Tensor) -> Tensor:
    """W itself, or W[i, j] = weight[(n - 1) + (j - i)] from the 2n - 1 offsets."""
    if weight.ndim == 2:
        return weight
    n = (len(weight) + 1) // 2
    weight_NN = weight.new_empty(n, n)
    launch = full_width(n)
    _spatial_weight_kernel[(triton.cdiv(n, launch["BLOCK_T"]),)](weight, weight_NN, n, **launch)
    return weight_NN


def spatial_weight_gradient(grad_gate_BNG: Tensor, v_BNG: Tensor, like: Tensor) -> Tensor:
    """sum_b grad_b v_b^T in float32, [n, n]; summed over its diagonals to [2n - 1] if `like` holds offsets."""
    batch_size, n, d_gate = v_BNG.shape
    tiles = TILES[v_BNG.dtype]
    tiles = {"BLOCK_I": tiles["BLOCK_N"], "BLOCK_J": tiles["BLOCK_G"]} | {
        name: tiles[name] for name in ("BLOCK_K", "num_warps", "num_stages")
    }
    num_tiles = triton.cdiv(n, tiles["BLOCK_I"]) * triton.cdiv(n, tiles["BLOCK_J"])
    sequences_per_part = triton.cdiv(batch_size, max(NUM_PROGRAMS // num_tiles, 1))
    num_parts = triton.cdiv(batch_size, sequences_per_part)
    parts_PNN = v_BNG.new_empty(num_parts, n, n, dtype=torch.float32)
    grid = (triton.cdiv(n, tiles["BLOCK_I"]), triton.cdiv(n, tiles["BLOCK_J"]), num_parts)
    _spatial_weight_gradient_kernel[grid](
        grad_gate_BNG, v_BNG, parts_PNN, batch_size, sequences_per_part, n, d_gate, **tiles
    )
    if like.ndim == 2:
        return parts_PNN.sum(0)
    grad_offsets = parts_PNN.new_empty(2 * n - 1)
    # Eight neighbouring diagonals in float32 are 32 bytes, the least that a GPU reads at once.
    block = {"BLOCK_I": min(triton.next_power_of_2(n), 512), "BLOCK_D": 8}
    _spatial_diagonals_kernel[(triton.cdiv(2 * n - 1, 8),)](parts_PNN, grad_offsets, num_parts, n, **block)
    return grad_offsets


@triton.jit
def _spatial_weight_kernel(offsets, weight_NN, n, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr):
    i = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    j = tl.arange(0, BLOCK_G)[None, :]
    inside = (i < n) & (j < n)
    tl.store(weight_NN + i * n + j, tl.load(offsets + (n - 1) + (j - i), mask=inside), mask=inside)


@triton.jit
def _spatial_weight_gradient_kernel(
    grad_gate_BNG, v_BNG, parts_PNN, batch_size, sequences_per_part, n, d_gate,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    part = tl.program_id(2)
    first = part * sequences_per_part
    num_sequences = tl.minimum(sequences_per_part, batch_size - first)
    blocks_per_sequence = tl.cdiv(d_gate, BLOCK_K)
    total = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    # One loop over sequences and channels, so that the next loads start early even where a sequence ends.
    for index in range(num_sequences * blocks_per_sequence):
        first_token = (first + index // blocks_per_sequence).to(tl.int64) * n
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
def _spatial_diagonals_kernel(parts_PNN, grad_offsets, num_parts, n, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offset d is the diagonal j - i = d - (n - 1)."""
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_I, BLOCK_D), tl.float32)
    for start in range(0, num_parts * n, BLOCK_I):  # the lines of all parts, one after another
        line = start + tl.arange(0, BLOCK_I)
        j = (line % n)[:, None] + d[None, :] - (n - 1)
        inside = (line < num_parts * n)[:, None] & (j >= 0) & (j < n)
        total += tl.load(parts_PNN + line[:, None].to(tl.int64) * n + j, mask=inside, other=0.0)
    tl.store(grad_offsets + d, tl.sum(total, axis=0), mask=d < 2 * n - 1)
