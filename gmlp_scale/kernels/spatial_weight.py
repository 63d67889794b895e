"""The spatial weight W: built from its offsets, and the gradient of either accumulated over the batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.gate import TILES
from gmlp_scale.kernels.layer_norm import whole_rows

NUM_PROGRAMS = 128
"""That the gradient's product is cut into where the batch allows it: about one for each multiprocessor of a GPU.
Not asked of the device, so that the order of the sum is the same on all."""


def spatial_matrix(weight: Tensor) -> Tensor:
    """W itself, or W[i, j] = weight[(n - 1) + (j - i)] from the 2n - 1 offsets."""
    if weight.ndim == 2:
        return weight
    n = (len(weight) + 1) // 2
    weight_NN = weight.new_empty(n, n)
    rows = whole_rows(n)
    _spatial_weight_kernel[(triton.cdiv(n, rows["BLOCK_R"]),)](weight, weight_NN, n, **rows)
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
    # Eight neighbouring diagonals are the shortest run that reads whole 32-byte sectors of memory.
    block = {"BLOCK_I": min(triton.next_power_of_2(n), 512), "BLOCK_D": 8}
    _spatial_diagonals_kernel[(triton.cdiv(2 * n - 1, 8),)](parts_PNN, grad_offsets, num_parts, n, **block)
    return grad_offsets


@triton.jit
def _spatial_weight_kernel(offsets, weight_NN, n, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    i = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
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
    # One loop over sequences and channels, so that its loads stay ahead across the sequences' bounds.
    for index in range(num_sequences * blocks_per_sequence):
        first_row = (first + index // blocks_per_sequence).to(tl.int64) * n
        channel = (index % blocks_per_sequence) * BLOCK_K + tl.arange(0, BLOCK_K)
        is_channel = channel < d_gate
        grad_gate = tl.load(
            grad_gate_BNG + first_row * d_gate + i[:, None] * d_gate + channel[None, :],
            mask=(i < n)[:, None] & is_channel[None, :],
            other=0.0,
        )
        v = tl.load(
            v_BNG + first_row * d_gate + j[None, :] * d_gate + channel[:, None],
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
    for start in range(0, num_parts * n, BLOCK_I):  # the parts' rows, one after another
        row = start + tl.arange(0, BLOCK_I)
        j = (row % n)[:, None] + d[None, :] - (n - 1)
        inside = (row < num_parts * n)[:, None] & (j >= 0) & (j < n)
        total += tl.load(parts_PNN + row[:, None].to(tl.int64) * n + j, mask=inside, other=0.0)
    tl.store(grad_offsets + d, tl.sum(total, axis=0), mask=d < 2 * n - 1)
