"""LayerNorm(GELU(v)) over the channels of the gate half, one kernel forward and one backward."""

from functools import cache, lru_cache
from math import ceil, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

MINUS_HALF_LOG2_E = tl.constexpr(-0.7213475204444817)
ONE_OVER_SQRT_2_PI = tl.constexpr(0.3989422804014327)

BACKWARD_WARPS_PER_MULTIPROCESSOR, BACKWARD_REGISTERS = 12, 168
"""How many of the backward kernels' warps a multiprocessor holds at once, with so many registers for a thread."""


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
    num_tokens, launch = mean_BN.numel(), full_width(d_ffn // 2)
    _layer_norm_of_gelu_kernel[(ceil(num_tokens / launch["BLOCK_T"]),)](
        z_BNF, gain_G, bias_G, v_BNG, mean_BN, rstd_BN, num_tokens, d_ffn // 2, eps, **launch
    )
    return v_BNG, mean_BN, rstd_BN


def layer_norm_of_gelu_backward(
    grad_v_BNG: Tensor,
    z_BNF: Tensor,
    mean_BN: Tensor,
    rstd_BN: Tensor,
    gain_G: Tensor,
    grad_z_BNF: Tensor,
    grads_P4G: Tensor,
) -> None:
    """Fills the second half of grad_z, and in grads_P4G the sums over it and the gradients of gain and bias."""
    num_tokens, d_gate = mean_BN.numel(), len(gain_G)
    _layer_norm_of_gelu_backward_kernel[(len(grads_P4G),)](
        grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF, grads_P4G,
        num_tokens, d_gate, **backward_launch(num_tokens, d_gate, z_BNF.device)[1],
    )  # fmt: skip


def new_partial_sums(z_BNF: Tensor) -> Tensor:
    """grads_P4G, where each of the P programs of a backward kernel writes what it sums over its tokens: u and v of z's
    gradient, then the gradients of gain and bias."""
    num_tokens, d_gate = z_BNF.shape[0] * z_BNF.shape[1], z_BNF.shape[2] // 2
    num_programs, _ = backward_launch(num_tokens, d_gate, z_BNF.device)
    return z_BNF.new_empty(num_programs, 4, d_gate, dtype=torch.float32)


@lru_cache
def backward_launch(num_tokens: int, d_gate: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """The number of programs, and the launch options, of a backward kernel.

    All programs run at once, each over its part of the tokens: a second wave would leave most of the GPU idle.
    """
    launch = full_width(d_gate)
    num_programs = max(BACKWARD_WARPS_PER_MULTIPROCESSOR // launch["num_warps"], 1) * num_multiprocessors(device)
    num_blocks = ceil(num_tokens / launch["BLOCK_T"])
    blocks_per_part = ceil(num_blocks / num_programs)
    options = {"blocks_per_part": blocks_per_part, "NUM_STAGES": 3, "maxnreg": BACKWARD_REGISTERS}
    return ceil(num_blocks / blocks_per_part), launch | options


@cache
def full_width(width: int) -> dict[str, int]:
    """Launch options of a program that holds all `width` channels of some tokens, 8 to 16 numbers in each thread.

    The channels are in one chunk or in three, whichever leaves fewer lanes without a channel: Triton's tensors have
    powers of two, and 1536 is three times 512.
    """
    chunk, num_chunks = min(((triton.next_power_of_2(ceil(width / n)), n) for n in (1, 3)), key=prod)
    num_tokens = max(1024 // triton.next_power_of_2(chunk * num_chunks), 1)
    num_warps = min(triton.next_power_of_2(ceil(num_tokens * width / 512)), 16)
    return {"BLOCK_T": num_tokens, "CHUNK_G": chunk, "NUM_CHUNKS": num_chunks, "num_warps": num_warps}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many the GPU has. In the interpreter 4, so that small tests too give a program more than one block."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _layer_norm_of_gelu_kernel(
    z_TF, gain_G, bias_G, v_TG, mean_T, rstd_T, num_tokens, d_gate, eps,
    BLOCK_T: tl.constexpr, CHUNK_G: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sums the channels and their squares at once, as differences from a token's first one.

    A number is at most sqrt(n - 1) standard deviations from the mean of its n. So if the first one is an outlier, the
    variance is wrong by some n roundings (3e-4 at 1536 channels, a tenth of what bfloat16 rounds), else by a few.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    v_TG_of_z = z_TF + (2 * token + 1)[:, None] * d_gate
    first = tl.load(v_TG_of_z, mask=is_token[:, None], other=0.0)
    shift, _ = gelu_and_slope(first.to(tl.float32))
    chunks = ()
    total = tl.zeros((BLOCK_T, CHUNK_G), tl.float32)
    squares = tl.zeros((BLOCK_T, CHUNK_G), tl.float32)
    for index in tl.static_range(NUM_CHUNKS):
        channel = index * CHUNK_G + tl.arange(0, CHUNK_G)[None, :]
        v = tl.load(v_TG_of_z + channel, mask=is_token[:, None] & (channel < d_gate), other=first)
        hidden, _ = gelu_and_slope(v.to(tl.float32))
        chunks += (hidden - shift,)  # 0 beyond the channels
        total += chunks[index]
        squares += chunks[index] * chunks[index]
    # Both sums in one, so that the warps wait for each other once.
    mean, mean_square = tl.split(tl.sum(tl.join(total, squares), axis=1) / d_gate)
    rstd = 1.0 / tl.sqrt(mean_square - mean * mean + eps)
    tl.store(mean_T + token, mean + tl.sum(shift, axis=1), mask=is_token)
    tl.store(rstd_T + token, rstd, mask=is_token)
    for index in tl.static_range(NUM_CHUNKS):
        channel = index * CHUNK_G + tl.arange(0, CHUNK_G)[None, :]
        gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
        bias = tl.load(bias_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
        normalised = (chunks[index] - mean[:, None]) * rstd[:, None] * gain + bias
        inside = is_token[:, None] & (channel < d_gate)
        tl.store(v_TG + token[:, None] * d_gate + channel, normalised, mask=inside)


@triton.jit
def _layer_norm_of_gelu_backward_kernel(
    grad_v_TG, z_TF, mean_T, rstd_T, gain_G, grad_z_TF, grads_P4G, num_tokens, d_gate, blocks_per_part,
    BLOCK_T: tl.constexpr, CHUNK_G: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    zeros = tl.zeros((BLOCK_T, CHUNK_G), tl.float32)
    sums = ((zeros, zeros, zeros),) * NUM_CHUNKS
    for block in tl.range(blocks_per_part, num_stages=NUM_STAGES):  # loads the next tokens early
        token = (part * blocks_per_part + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = token < num_tokens
        mean = tl.load(mean_T + token, mask=is_token, other=0.0)[:, None]
        rstd = tl.load(rstd_T + token, mask=is_token, other=0.0)[:, None]
        place, place_in_z = token[:, None] * d_gate, (2 * token + 1)[:, None] * d_gate
        chunks, total, products = (), zeros, zeros
        for index in tl.static_range(NUM_CHUNKS):
            channel = index * CHUNK_G + tl.arange(0, CHUNK_G)[None, :]
            inside = is_token[:, None] & (channel < d_gate)
            v = tl.load(z_TF + place_in_z + channel, mask=inside, other=0.0).to(tl.float32)
            grad_v = tl.load(grad_v_TG + place + channel, mask=inside, other=0.0).to(tl.float32)
            gain = tl.load(gain_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)
            hidden, slope = gelu_and_slope(v)
            normalised = (hidden - mean) * rstd
            grad = grad_v * gain
            total += grad
            products += grad * normalised
            chunks += ((grad_v, grad, normalised, slope),)
        shift, scale = tl.split(tl.sum(tl.join(total, products), axis=1) / d_gate)
        new_sums = ()
        for index in tl.static_range(NUM_CHUNKS):
            channel = index * CHUNK_G + tl.arange(0, CHUNK_G)[None, :]
            grad_v, grad, normalised, slope = chunks[index]
            grad_z = rstd * (grad - shift[:, None] - normalised * scale[:, None]) * slope
            tl.store(grad_z_TF + place_in_z + channel, grad_z, mask=is_token[:, None] & (channel < d_gate))
            sum_z, grad_gain, grad_bias = sums[index]  # 0 for what is no token
            new_sums += ((sum_z + grad_z, grad_gain + grad_v * normalised, grad_bias + grad_v),)
        sums = new_sums
    for index in tl.static_range(NUM_CHUNKS):
        channel = index * CHUNK_G + tl.arange(0, CHUNK_G)
        grads_G = grads_P4G + (4 * part + 1) * d_gate + channel
        for number in tl.static_range(3):
            tl.store(grads_G + number * d_gate, tl.sum(sums[index][number], axis=0), mask=channel < d_gate)
