"""Self-attention, and the block around an attention: what the families with attention have in common.

Shape suffixes: B batch, N positions, D width, H heads, K head width.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gmlp_scale.models.layers import FamilyConfig, LayerNorm, Width, flatten_heads


class AttentionConfig(FamilyConfig):
    """A family of AttentionBlocks."""

    masks_padding: Literal[True] = True
    """No position attends to <pad>. These families always did so."""
    num_heads: Width
    """Heads of each layer's attention; d_model is a multiple of it. [heads]"""

    @model_validator(mode="after")
    def _whole_heads(self):
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model is {self.d_model} and num_heads {self.num_heads}: make d_model a multiple of num_heads"
            )
        return self


class AttentionBlock(nn.Module):
    """One layer, x_BND -> x_BND: x + Attention(LayerNorm(x)), then x + activation(LayerNorm(x) U) V.

    attention: (x_BND, is_token_BN) -> attended_BND. No position attends to a position where is_token_BN is False.
    """

    def __init__(
        self, attention: nn.Module, d_model: int, d_ffn: int, dropout: float, activation: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.attention_norm = LayerNorm(d_model)
        self.attention = attention
        self.norm = LayerNorm(d_model)
        self.expand = nn.Linear(d_model, d_ffn)
        self.project = nn.Linear(d_ffn, d_model)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        x_BND = x_BND + self.dropout(self.attention(self.attention_norm(x_BND), is_token_BN))
        return x_BND + self.dropout(self.project(self.activation(self.expand(self.norm(x_BND)))))

    def attention_weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """weights_BHNN of the attention, where the block's input is x_BND."""
        return self.attention.weights(self.attention_norm(x_BND), is_token_BN)


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(K) + relative biases) v over all positions that hold a token.

    Args:
        relative_bias: (num_positions, device) -> bias_HNN, or None. Not together with `causal`.
        causal: no position attends to a later one.
        d_attn, d_out: the widths of all heads together and of the output, if they are not d_model.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float,
        *,
        qkv_bias: bool = True,
        out_bias: bool = True,
        relative_bias: nn.Module | None = None,
        causal: bool = False,
        d_attn: int | None = None,
        d_out: int | None = None,
    ):
        super().__init__()
        assert not (relative_bias and causal)
        self.num_heads, self.dropout, self.causal = num_heads, dropout, causal
        self.always_fused = False  # True also takes torch's fused kernel in bfloat16 on a CPU, as a GPU does
        self.qkv = nn.Linear(d_model, 3 * (d_attn or d_model), bias=qkv_bias)
        self.relative_bias = relative_bias
        self.out = nn.Linear(d_attn or d_model, d_out or d_model, bias=out_bias)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        return self.out(self.context(x_BND, is_token_BN))

    def context(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """[B, N, H K], before the projection to the output; fused kernels project it themselves."""
        q_BHNK, k_BHNK, v_BHNK = self._queries_keys_values(x_BND)
        if q_BHNK.device.type == "cpu" and q_BHNK.dtype == torch.bfloat16 and not self.always_fused:
            # The backward pass of torch's fused kernel takes two to five times as long here (docs/LOG.md).
            weights_BHNN = _softmax(q_BHNK, k_BHNK, self._mask(x_BND, is_token_BN)).to(v_BHNK.dtype)
            return flatten_heads(F.dropout(weights_BHNN, self.dropout, self.training) @ v_BHNK)
        is_plainly_causal = self.causal and is_token_BN is None  # for which torch needs no mask
        mask = None if is_plainly_causal else self._mask(x_BND, is_token_BN)
        dropout = self.dropout if self.training else 0.0
        attended_BHNK = F.scaled_dot_product_attention(
            q_BHNK, k_BHNK, v_BHNK, attn_mask=mask, dropout_p=dropout, is_causal=is_plainly_causal
        )
        return flatten_heads(attended_BHNK)

    def weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """The softmax as float32 weights_BHNN: what each position (third axis) takes from each (fourth axis)."""
        q_BHNK, k_BHNK, _ = self._queries_keys_values(x_BND)
        return _softmax(q_BHNK, k_BHNK, self._mask(x_BND, is_token_BN))

    def _queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, ...]:
        qkv_BN3HK = self.qkv(x_BND).unflatten(-1, (3, self.num_heads, -1))
        return tuple(part.transpose(1, 2) for part in qkv_BN3HK.unbind(2))

    def _mask(self, x_BND: Tensor, is_token_BN: Tensor | None) -> Tensor | None:
        """What scaled_dot_product_attention takes: an attention_mask, or biases with -inf at padding."""
        mask = attention_mask(x_BND.shape[1], is_token_BN, self.causal, x_BND.device)
        if self.relative_bias is None:
            return mask
        bias_1HNN = self.relative_bias(x_BND.shape[1], x_BND.device).unsqueeze(0)
        return bias_1HNN.masked_fill(~mask, -torch.inf) if mask is not None else bias_1HNN


def _softmax(q_BHNK: Tensor, k_BHNK: Tensor, mask: Tensor | None) -> Tensor:
    """Float32 weights_BHNN."""
    scores_BHNN = q_BHNK @ k_BHNK.mT / math.sqrt(q_BHNK.shape[-1])
    if mask is not None:
        scores_BHNN = scores_BHNN.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BHNN + mask
    return scores_BHNN.softmax(-1, dtype=torch.float32)


def attention_mask(num_positions: int, is_token_BN: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """True where a position (second to last dimension) may attend to another (last); None where all may to all."""
    mask = None if is_token_BN is None else is_token_BN[:, None, None]  # B11N
    if causal:
        lower_NN = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device).tril()
        mask = lower_NN if mask is None else mask & lower_NN
    return mask
