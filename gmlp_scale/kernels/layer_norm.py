"""LayerNorm(GELU(v)) over the channels of the gate half, in one pass forward and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_HALF_OVER_PI = tl.constexpr(0.3989422804014327)

MAX_PARTS = 512
"""Of the rows, each summed by one program: enough to fill any GPU, few enough that adding them up costs little."""


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))


@triton.jit
def gelu_slope(x):
    return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * SQRT_HALF_OVER_PI * tl.exp(-0.5 * x * x)


def layer_norm_of_gelu(z_BNF: Tensor, gain_G: Tensor, bias_G: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the second half of z: (normalised v_BNG in z's dtype, mean_BN and 1 / deviation rstd_BN in float32)."""
    batch_size, num_positions, d_ffn = z_BNF.shape
    v_BNG = z_BNF.new_empty(batch_size, num_positions, d_ffn // 2)
    mean_BN = z_BNF.new_empty(batch_size, num_positions, dtype=torch.float32)
    rstd_BN = torch.empty_like(mean_BN)
    rows = whole_rows(d_ffn // 2)
    grid = (triton.cdiv(mean_BN.numel(), rows["BLOCK_R"]),)
    _layer_norm_of_gelu_kernel[grid](
        z_BNF, gain_G, bias_G, v_BNG, mean_BN, rstd_BN, mean_BN.numel(), d_ffn // 2, eps, **rows
    )
    return v_BNG, mean_BN, rstd_BN


def layer_norm_of_gelu_backward(
    grad_v_BNG: Tensor, z_BNF: Tensor, mean_BN: Tensor, rstd_BN: Tensor, gain_G: Tensor, grad_z_BNF: Tensor
) -> tuple[Tensor, Tensor]:
    """Fills the second half of grad_z; returns the float32 gradients of gain and bias."""
    num_rows, d_gate = mean_BN.numel(), len(gain_G)
    rows = whole_rows(d_gate)
    num_blocks = triton.cdiv(num_rows, rows["BLOCK_R"])
    blocks_per_part = triton.cdiv(num_blocks, MAX_PARTS)
    num_parts = triton.cdiv(num_blocks, blocks_per_part)
    grads_P2G = z_BNF.new_empty(num_parts, 2, d_gate, dtype=torch.float32)
    _layer_norm_of_gelu_backward_kernel[(num_parts,)](
        grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF, grads_P2G, num_rows, blocks_per_part, d_gate, **rows
    )
    grad_gain_G, grad_bias_G = grads_P2G.sum(0).unbind()
    return grad_gain_G, grad_bias_G


def whole_rows(d_gate: int) -> dict[str, int]:
    """Launch options of a program that holds all channels of some rows, about 2048 numbers."""
    block = triton.next_power_of_2(d_gate)
    return {"BLOCK_R": max(2048 // block, 1), "BLOCK_G": block, "num_warps": 8}


@triton.jit
def _layer_norm_of_gelu_kernel(
    z_RF, gain_G, bias_G, v_RG, mean_R, rstd_R, num_rows, d_gate, eps, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    channel = tl.arange(0, BLOCK_G)
    is_row, is_channel = row < num_rows, (channel < d_gate)[None, :]
    inside = is_row[:, None] & is_channel
    v = tl.load(z_RF + (2 * row + 1)[:, None] * d_gate + channel[None, :], mask=inside, other=0.0)
    hidden = gelu(v.to(tl.float32))
    mean = tl.sum(hidden, axis=1) / d_gate
    centred = tl.where(is_channel, hidden - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / d_gate + eps)
    gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
    bias = tl.load(bias_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
    normalised = centred * rstd[:, None] * gain[None, :] + bias[None, :]
    tl.store(v_RG + row[:, None] * d_gate + channel[None, :], normalised, mask=inside)
    tl.store(mean_R + row, mean, mask=is_row)
    tl.store(rstd_R + row, rstd, mask=is_row)


@triton.jit
def _layer_norm_of_gelu_backward_kernel(
    grad_v_RG, z_RF, mean_R, rstd_R, gain_G, grad_z_RF, grads_P2G,
    num_rows, blocks_per_part, d_gate, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_G)
    is_channel = (channel < d_gate)[None, :]
    gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)[None, :]
    grad_gain = tl.zeros((BLOCK_R, BLOCK_G), tl.float32)
    grad_bias = tl.zeros((BLOCK_R, BLOCK_G), tl.float32)
    for index in range(blocks_per_part):
        row = (part * blocks_per_part + index) * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row = row < num_rows
        inside = is_row[:, None] & is_channel
        place = (2 * row + 1)[:, None] * d_gate + channel[None, :]
        v = tl.load(z_RF + place, mask=inside, other=0.0).to(tl.float32)
        grad_v = tl.load(grad_v_RG + row[:, None] * d_gate + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_R + row, mask=is_row, other=0.0)[:, None]
        rstd = tl.load(rstd_R + row, mask=is_row, other=0.0)[:, None]
        normalised = tl.where(is_channel, (gelu(v) - mean) * rstd, 0.0)
        grad_gain += grad_v * normalised
        grad_bias += grad_v
        grad = grad_v * gain
        shift = tl.sum(grad, axis=1)[:, None] / d_gate
        scale = tl.sum(grad * normalised, axis=1)[:, None] / d_gate
        grad_hidden = rstd * (grad - shift - normalised * scale)
        tl.store(grad_z_RF + place, grad_hidden * gelu_slope(v), mask=inside)
    grads_G = grads_P2G + 2 * part * d_gate + channel
    tl.store(grads_G, tl.sum(grad_gain, axis=0), mask=channel < d_gate)
    tl.store(grads_G + d_gate, tl.sum(grad_bias, axis=0), mask=channel < d_gate)
