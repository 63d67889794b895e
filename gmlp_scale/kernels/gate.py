"""The gate: one kernel for the spatial product, the bias, the tiny attention and the product with GELU(u), and one for
its backward pass."""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.layer_norm import full_width, gelu, gelu_slope

TILES = {
    torch.bfloat16: {"BLOCK_N": 128, "BLOCK_G": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    torch.float32: {"BLOCK_N": 64, "BLOCK_G": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2},
}
"""The tiles of the matrix products: positions x channels of the output, and how much of the sum is loaded at once."""


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
    tiles = TILES[z_BNF.dtype]
    grid = (ceil(num_positions / tiles["BLOCK_N"]), ceil(d_gate / tiles["BLOCK_G"]), batch_size)
    d_attn = 0 if context_BNK is None else context_BNK.shape[-1]
    _spatial_gate_kernel[grid](
        z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G,
        gate_BNG if keeps_gate else None, output_BNG, num_positions, d_gate, d_attn, **tiles,
    )  # fmt: skip
    return output_BNG, gate_BNG


def apply_gate_backward(
    grad_output_BNG: Tensor, z_BNF: Tensor, gate_BNG: Tensor, grad_z_BNF: Tensor
) -> tuple[Tensor, Tensor]:
    """Fills the first half of grad_z. Returns the gradients of S, and of b for each sequence in float32."""
    grad_gate_BNG = torch.empty_like(gate_BNG)
    grad_bias_BN = gate_BNG.new_empty(gate_BNG.shape[:2], dtype=torch.float32)
    num_tokens, d_gate = grad_bias_BN.numel(), gate_BNG.shape[-1]
    launch = full_width(d_gate)
    _spatial_gate_backward_kernel[(ceil(num_tokens / launch["BLOCK_T"]),)](
        grad_output_BNG, z_BNF, gate_BNG, grad_z_BNF, grad_gate_BNG, grad_bias_BN, num_tokens, d_gate, **launch
    )
    return grad_gate_BNG, grad_bias_BN


@triton.jit
def _spatial_gate_kernel(
    z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G, gate_BNG, output_BNG,
    num_positions, d_gate, d_attn, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    # 64 bits address a sequence and 32 bits an element within it, which takes half the registers.
    first_token = tl.program_id(2).to(tl.int64) * num_positions
    is_position, is_channel = (position < num_positions)[:, None], (channel < d_gate)[None, :]

    gate = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for start in range(0, num_positions, BLOCK_K):
        other = start + tl.arange(0, BLOCK_K)
        is_other = other < num_positions
        weight = tl.load(
            weight_NN + position[:, None] * num_positions + other[None, :],
            mask=is_position & is_other[None, :],
            other=0.0,
        )
        v = tl.load(
            v_BNG + first_token * d_gate + other[:, None] * d_gate + channel[None, :],
            mask=is_other[:, None] & is_channel,
            other=0.0,
        )
        gate = tl.dot(weight, v, gate, input_precision="ieee")
    if context_BNK is not None:  # more of the same sum
        for start in range(0, d_attn, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            is_k = k < d_attn
            context = tl.load(
                context_BNK + first_token * d_attn + position[:, None] * d_attn + k[None, :],
                mask=is_position & is_k[None, :],
                other=0.0,
            )
            out_weight = tl.load(
                out_weight_GK + channel[None, :] * d_attn + k[:, None], mask=is_channel & is_k[:, None], other=0.0
            )
            gate = tl.dot(context, out_weight, gate, input_precision="ieee")
        gate += tl.load(out_bias_G + channel, mask=channel < d_gate, other=0.0).to(tl.float32)[None, :]
    gate += tl.load(bias_N + position, mask=position < num_positions, other=0.0).to(tl.float32)[:, None]

    inside = is_position & is_channel
    place = position[:, None] * d_gate + channel[None, :]
    if gate_BNG is not None:
        tl.store(gate_BNG + first_token * d_gate + place, gate, mask=inside)
    u = tl.load(
        z_BNF + first_token * (2 * d_gate) + position[:, None] * (2 * d_gate) + channel[None, :], mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(output_BNG + first_token * d_gate + place, gelu(u) * gate, mask=inside)


@triton.jit
def _spatial_gate_backward_kernel(
    grad_output_TG, z_TF, gate_TG, grad_z_TF, grad_gate_TG, grad_bias_T,
    num_tokens, d_gate, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_G)[None, :]
    inside = (token < num_tokens)[:, None] & (channel < d_gate)
    place, place_in_z = token[:, None] * d_gate + channel, 2 * token[:, None] * d_gate + channel
    grad_output = tl.load(grad_output_TG + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_TG + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(z_TF + place_in_z, mask=inside, other=0.0).to(tl.float32)
    grad_gate = grad_output * gelu(u)
    tl.store(grad_gate_TG + place, grad_gate, mask=inside)
    tl.store(grad_z_TF + place_in_z, grad_output * gate * gelu_slope(u), mask=inside)
    tl.store(grad_bias_T + token, tl.sum(grad_gate, axis=1), mask=token < num_tokens)
