"""ModernBERT's Transformer (Warner et al. 2024, arXiv 2412.13663): no biases, rotary positions, GeGLU, local layers.

    x = x + Attention(norm(x))
    a, b = split(norm(x) U)
    x = x + (gelu(a) * b) V

The first layer's norm is that of the embedding: x = norm(x), and then x + Attention(x). So hidden states, weights and
parameter counts are ModernBERT's. It starts like all families here, from N(0, 0.02) (backbone.py); ModernBERT cuts that
off at two standard deviations and divides it by sqrt(2 layers) where a branch ends.

Shape suffixes: B batch, N positions, D width, H heads, K head width.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gmlp_scale.fields import Count, Positive
from gmlp_scale.models.attention import AttentionConfig, SelfAttention
from gmlp_scale.models.layers import LayerNorm, RMSNorm, Width


class ModernTransformerConfig(AttentionConfig):
    display_name: ClassVar[str] = "Modern Transformer"
    blocks_differ: ClassVar[bool] = True
    kind: Literal["modern_transformer"] = "modern_transformer"
    """ModernBERT's layers: rotary positions, GeGLU, local attention, no biases."""
    d_ffn: Width
    """Width of the feed-forward part's hidden layer, whose gate is as wide again. [channels]"""
    num_heads: Width
    """Heads of each layer's attention; d_model is an even multiple of it. [heads]"""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """What normalises before each part and after the last layer: LayerNorm without bias, ModernBERT's, or RMSNorm."""
    window: Width | None = 128
    """In a local layer a position attends to those at most half of this away. null: no layer is local. [tokens]"""
    global_every: Count = 3
    """The first layer of so many attends to all positions; the others are local. [blocks]"""
    global_theta: Positive = 10_000.0
    """The base of the rotary angles where attention is global. ModernBERT has 10,000 for rows of up to 1,024 tokens and
    160,000 for longer ones. [no unit]"""
    local_theta: Positive = 10_000.0
    """The base of the rotary angles in local layers. [no unit]"""

    @model_validator(mode="after")
    def _even_heads(self):
        if self.d_model % (2 * self.num_heads):
            found = f"d_model is {self.d_model} and num_heads {self.num_heads}"
            raise ValueError(f"{found}: rotary positions turn pairs of channels, so make a head's width even")
        return self

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: n (4 d^2 + 3 d f) + 2 n^2 d. In local layers too: their pairs outside
        the window are masked, not left out."""
        n, d = self.sequence_length, self.d_model
        return n * (4 * d * d + 3 * d * self.d_ffn) + 2 * n * n * d

    def new_norm(self) -> nn.Module:
        return RMSNorm(self.d_model, eps=1e-5) if self.norm == "rms_norm" else LayerNorm(self.d_model, bias=False)


class ModernTransformerBlock(nn.Module):
    """One layer, x_BND -> x_BND. `index` counts from 0."""

    def __init__(self, config: ModernTransformerConfig, dropout: float = 0.0, *, index: int):
        super().__init__()
        self.is_first = index == 0
        self.attention_norm = config.new_norm()
        self.attention = RotaryAttention(config, dropout, is_local=index % config.global_every != 0)
        self.norm = config.new_norm()
        self.expand = nn.Linear(config.d_model, 2 * config.d_ffn, bias=False)
        self.project = nn.Linear(config.d_ffn, config.d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        y_BND = self.attention_norm(x_BND)
        x_BND = (y_BND if self.is_first else x_BND) + self.dropout(self.attention(y_BND, is_token_BN))
        hidden_BNF, gate_BNF = self.expand(self.norm(x_BND)).chunk(2, dim=-1)
        return x_BND + self.dropout(self.project(F.gelu(hidden_BNF) * gate_BNF))

    def attention_weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """weights_BHNN of the attention, where the block's input is x_BND."""
        return self.attention.weights(self.attention_norm(x_BND), is_token_BN)


class RotaryAttention(SelfAttention):
    """Self-attention without biases, whose queries and keys are turned by their positions (RoPE, arXiv 2104.09864)."""

    def __init__(self, config: ModernTransformerConfig, dropout: float, *, is_local: bool):
        super().__init__(config.d_model, config.num_heads, dropout, qkv_bias=False, out_bias=False)
        is_local = is_local and config.window is not None
        self.theta = config.local_theta if is_local else config.global_theta
        # A window as long as any row needs no mask.
        self.reach = config.window // 2 if is_local and config.window // 2 < config.sequence_length - 1 else None

    def _queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, ...]:
        q_BHNK, k_BHNK, v_BHNK = super()._queries_keys_values(x_BND)
        num_positions, width = q_BHNK.shape[-2:]
        at = {"device": x_BND.device, "dtype": torch.promote_types(x_BND.dtype, torch.float32)}
        angles_NK = torch.outer(
            torch.arange(num_positions, **at), self.theta ** -(torch.arange(0, width, 2, **at) / width)
        )
        cos_NK, sin_NK = angles_NK.cos(), angles_NK.sin()
        return rotated(q_BHNK, cos_NK, sin_NK), rotated(k_BHNK, cos_NK, sin_NK), v_BHNK

    def _mask(self, x_BND: Tensor, is_token_BN: Tensor | None) -> Tensor | None:
        mask = super()._mask(x_BND, is_token_BN)
        if self.reach is None:
            return mask
        positions_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        is_near = (positions_N - positions_N[:, None]).abs() <= self.reach
        if mask is None:
            return is_near
        # Padding may have no token near it, and a softmax over nothing would be NaN: it attends to all tokens.
        return mask & (is_near | ~is_token_BN[:, None, :, None])


def rotated(x_BHNK: Tensor, cos_NK: Tensor, sin_NK: Tensor) -> Tensor:
    """Turns channel k and channel K/2 + k of each position by the k-th of its angles. cos_NK and sin_NK have K/2."""
    first, second = x_BHNK.to(cos_NK.dtype).chunk(2, dim=-1)
    turned = first * cos_NK - second * sin_NK, second * cos_NK + first * sin_NK
    return torch.cat(turned, dim=-1).to(x_BHNK.dtype)
