"""LayerNorm(GELU(v)) over the channels of the gate half, one kernel forward and one backward."""

from functools import cache
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

MINUS_HALF_LOG2_E = tl.constexpr(-0.7213475204444817)
ONE_OVER_SQRT_2_PI = tl.constexpr(0.3989422804014327)

BACKWARD_PROGRAMS_PER_MULTIPROCESSOR = 2
"""How many programs of the backward kernel a multiprocessor holds at once, by their registers on sm_90."""


@triton.jit
def gelu_and_slope(x):
    """GELU and its derivative. Who uses only one pays for that alone.

    The tail of the normal distribution beyond |x| is exp(-x^2 / 2) times a polynomial in 1 / (1 + c |x|): the form of
    Abramowitz and Stegun 7.1.26, whose exponential the slope needs too. Their five coefficients are within 1.5e-7 of
    erf, but far off where the tail is below 1e-11. These six are within 4e-8, and within 0.06 % of the tail down to
    where float32 ends. Both results take 19 instructions of sm_90; with tl.erf they took 44.
    """
    bell = tl.exp2(x * x * MINUS_HALF_LOG2_E)
    divisor = 1.0 + 0.283 * tl.abs(x)
    t = tl.rsqrt(divisor * divisor)  # a division would be seven instructions instead of two
    polynomial = 0.22616205 + t * (-0.17507762 + t * (0.34796095 - t * 0.09866371))
    tail = bell * t * (0.11554618 + t * (0.08407215 + t * polynomial))
    below = tl.where(x < 0, tail, 1.0 - tail)
    return x * below, below + x * bell * ONE_OVER_SQRT_2_PI


def layer_norm_of_gelu(z_BNF: Tensor, gain_G: Tensor, bias_G: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Reads the second half of z. Returns normalised v_BNG in z's dtype, and mean_BN and rstd_BN, which is one over the
    standard deviation, in float32."""
    batch_size, num_positions, d_ffn = z_BNF.shape
    v_BNG = z_BNF.new_empty(batch_size, num_positions, d_ffn // 2)
    mean_BN = z_BNF.new_empty(batch_size, num_positions, dtype=torch.float32)
    rstd_BN = torch.empty_like(mean_BN)
    launch = full_width(d_ffn // 2)
    grid = (ceil(mean_BN.numel() / launch["BLOCK_T"]),)
    _layer_norm_of_gelu_kernel[grid](
        z_BNF, gain_G, bias_G, v_BNG, mean_BN, rstd_BN, mean_BN.numel(), d_ffn // 2, eps, **launch
    )
    return v_BNG, mean_BN, rstd_BN


def layer_norm_of_gelu_backward(
    grad_v_BNG: Tensor, z_BNF: Tensor, mean_BN: Tensor, rstd_BN: Tensor, gain_G: Tensor, grad_z_BNF: Tensor
) -> Tensor:
    """Fills the second half of grad_z. Returns the gradients of gain and bias in float32, [2, G]."""
    num_tokens, d_gate = mean_BN.numel(), len(gain_G)
    launch = full_width(d_gate)
    num_blocks = ceil(num_tokens / launch["BLOCK_T"])
    # All programs run at once, each over its part of the tokens: a second wave would leave most of the GPU idle.
    num_programs = BACKWARD_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(z_BNF.device)
    blocks_per_part = ceil(num_blocks / num_programs)
    num_parts = ceil(num_blocks / blocks_per_part)
    grads_P2G = z_BNF.new_empty(num_parts, 2, d_gate, dtype=torch.float32)
    _layer_norm_of_gelu_backward_kernel[(num_parts,)](
        grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF, grads_P2G,
        num_tokens, blocks_per_part, d_gate, NUM_STAGES=3, **launch,
    )  # fmt: skip
    return grads_P2G.sum(0)


@cache
def full_width(width: int) -> dict[str, int]:
    """Launch options of a program that holds all `width` channels of some tokens, about 2048 numbers."""
    block = triton.next_power_of_2(width)
    return {"BLOCK_T": max(2048 // block, 1), "BLOCK_G": block, "num_warps": 8}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many the GPU has. In the interpreter 4, so that small tests too give a program more than one block."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _layer_norm_of_gelu_kernel(
    z_TF, gain_G, bias_G, v_TG, mean_T, rstd_T, num_tokens, d_gate, eps, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_G)
    is_token, is_channel = token < num_tokens, (channel < d_gate)[None, :]
    inside = is_token[:, None] & is_channel
    v = tl.load(z_TF + (2 * token + 1)[:, None] * d_gate + channel[None, :], mask=inside, other=0.0)
    hidden, _ = gelu_and_slope(v.to(tl.float32))
    mean = tl.sum(hidden, axis=1) / d_gate
    centred = tl.where(is_channel, hidden - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / d_gate + eps)
    gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
    bias = tl.load(bias_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
    normalised = centred * rstd[:, None] * gain[None, :] + bias[None, :]
    tl.store(v_TG + token[:, None] * d_gate + channel[None, :], normalised, mask=inside)
    tl.store(mean_T + token, mean, mask=is_token)
    tl.store(rstd_T + token, rstd, mask=is_token)


@triton.jit
def _layer_norm_of_gelu_backward_kernel(
    grad_v_TG, z_TF, mean_T, rstd_T, gain_G, grad_z_TF, grads_P2G,
    num_tokens, blocks_per_part, d_gate, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_G)
    is_channel = (channel < d_gate)[None, :]
    gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)[None, :]
    grad_gain = tl.zeros((BLOCK_T, BLOCK_G), tl.float32)
    grad_bias = tl.zeros((BLOCK_T, BLOCK_G), tl.float32)
    for index in tl.range(blocks_per_part, num_stages=NUM_STAGES):  # loads the next tokens early
        token = (part * blocks_per_part + index) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = token < num_tokens
        inside = is_token[:, None] & is_channel
        place = (2 * token + 1)[:, None] * d_gate + channel[None, :]
        v = tl.load(z_TF + place, mask=inside, other=0.0).to(tl.float32)
        grad_v = tl.load(grad_v_TG + token[:, None] * d_gate + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_T + token, mask=is_token, other=0.0)[:, None]
        rstd = tl.load(rstd_T + token, mask=is_token, other=0.0)[:, None]
        hidden, slope = gelu_and_slope(v)
        normalised = tl.where(is_channel, (hidden - mean) * rstd, 0.0)
        grad_gain += grad_v * normalised
        grad_bias += grad_v
        grad = grad_v * gain
        shift = tl.sum(grad, axis=1)[:, None] / d_gate
        scale = tl.sum(grad * normalised, axis=1)[:, None] / d_gate
        grad_hidden = rstd * (grad - shift - normalised * scale)
        tl.store(grad_z_TF + place, grad_hidden * slope, mask=inside)
    grads_G = grads_P2G + 2 * part * d_gate + channel
    tl.store(grads_G, tl.sum(grad_gain, axis=0), mask=channel < d_gate)
    tl.store(grads_G + d_gate, tl.sum(grad_bias, axis=0), mask=channel < d_gate)
