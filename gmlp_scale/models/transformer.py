"""The Transformer encoders that the paper compares with (Tables 3 to 5): BERT's layers with LayerNorm before each part.

    x = x + Attention(LayerNorm(x))
    x = x + gelu(LayerNorm(x) U) V

The paper does not say where its LayerNorms are. BERT has one after each sum and one after the embedding. Here one is
before each part and one after the last layer, and the number of parameters is the same. This form trains without
clipping at the depths of Table 4 and at the ablations' learning rate of 7e-4. It also shares gMLP's trunk, so a
comparison is between the blocks alone.

Shape suffixes: B batch, N positions, D width, H heads, K head width.
"""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.models.attention import AttentionBlock, AttentionConfig, SelfAttention
from gmlp_scale.models.layers import Width, toeplitz

NUM_BUCKETS = 32
MAX_DISTANCE = 128


class TransformerConfig(AttentionConfig):
    display_name: ClassVar[str] = "Transformer"
    kind: Literal["transformer"] = "transformer"
    """BERT's layers, with LayerNorm before each part."""
    d_ffn: Width
    """Width of the feed-forward part's hidden layer. [channels]"""
    positions: Literal["absolute", "relative", "relative_only"]
    """absolute: learned embeddings, added to the tokens'. relative: T5's biases in the softmax, per layer and head.
    relative_only: those biases alone, without queries and keys (third line of Table 3)."""

    @property
    def has_absolute_positions(self) -> bool:
        return self.positions == "absolute"

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: n (4 d^2 + 2 d f) + 2 n^2 d. Without queries and keys the attention's
        part, 4 n d^2 + 2 n^2 d, is half of that."""
        n, d = self.sequence_length, self.d_model
        attention = 2 * (n * d * d) + n * n * d
        if self.positions != "relative_only":
            attention *= 2
        return attention + 2 * n * d * self.d_ffn


class TransformerBlock(AttentionBlock):
    def __init__(self, config: TransformerConfig, dropout: float = 0.0):
        d_model, num_heads = config.d_model, config.num_heads
        if config.positions == "relative_only":
            attention = PositionalAveraging(d_model, num_heads, dropout)
        else:
            relative_bias = RelativeBias(num_heads) if config.positions == "relative" else None
            attention = SelfAttention(d_model, num_heads, dropout, relative_bias=relative_bias)
        super().__init__(attention, d_model, config.d_ffn, dropout, F.gelu)


class PositionalAveraging(nn.Module):
    """softmax(relative biases) v: self-attention without queries and keys (a Random Synthesizer)."""

    def __init__(self, d_model: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)
        self.value = nn.Linear(d_model, d_model)
        self.relative_bias = RelativeBias(num_heads)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        v_BNHK = self.value(x_BND).unflatten(-1, (self.num_heads, -1))
        weights_HNN = self._weights_without_padding(x_BND)
        if is_token_BN is not None:
            v_BNHK = v_BNHK * is_token_BN[:, :, None, None]
        sums_BNHK = torch.einsum("hij,bjhk->bihk", self.dropout(weights_HNN), v_BNHK)
        if is_token_BN is not None:  # all rows have the same weights, so divide by the part that falls on tokens
            shares_BNH = torch.einsum("hij,bj->bih", weights_HNN, is_token_BN.to(weights_HNN.dtype))
            sums_BNHK = sums_BNHK / shares_BNH.clamp(min=torch.finfo(shares_BNH.dtype).tiny).unsqueeze(-1)
        return self.out(sums_BNHK.flatten(2))

    def weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """Float32 weights_BHNN: what each position (third axis) takes from each position (fourth axis)."""
        weights_BHNN = self._weights_without_padding(x_BND).float().expand(len(x_BND), -1, -1, -1)
        if is_token_BN is None:
            return weights_BHNN
        weights_BHNN = weights_BHNN * is_token_BN[:, None, None]
        return weights_BHNN / weights_BHNN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)

    def _weights_without_padding(self, x_BND: Tensor) -> Tensor:
        bias_HNN = self.relative_bias(x_BND.shape[1], x_BND.device)
        softmax_in = torch.promote_types(bias_HNN.dtype, torch.float32)
        return bias_HNN.softmax(-1, dtype=softmax_in).to(bias_HNN.dtype)


class RelativeBias(nn.Module):
    """T5's relative position biases in its bidirectional scheme (arXiv 1910.10683): 32 buckets, up to distance 128.

    16 buckets are for earlier positions and 16 for later ones. Of each 16, eight are for the distances 0 to 7, one
    each. The other eight are for ranges up to 128 of equal size in the logarithm; all longer distances are in the last.
    T5 has one table for all its layers. Here each layer has its own: "both layer- and head-specific" (section 4.1).
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.table = nn.Embedding(NUM_BUCKETS, num_heads)

    def forward(self, num_positions: int, device: torch.device) -> Tensor:
        """bias_HNN[h, i, j] for query i and key j, on the device of the activations."""
        offsets = torch.arange(1 - num_positions, num_positions, device=device)
        return toeplitz(self.table(relative_bucket(offsets)).T)


def relative_bucket(offsets: Tensor) -> Tensor:
    """T5's bucket, 0 to 31, of each offset: the key's position minus the query's."""
    num_per_side = NUM_BUCKETS // 2
    num_exact = num_per_side // 2
    distance = offsets.abs()
    # At 16, 32 and 64 the result is a whole number, and a device may round it to just below. Adding 1e-3 prevents that;
    # no other distance is so close to the next bucket.
    ranges = torch.log(distance.clamp(min=1) / num_exact) / math.log(MAX_DISTANCE / num_exact)
    far = num_exact + (ranges * (num_per_side - num_exact) + 1e-3).long()
    bucket = torch.where(distance < num_exact, distance, far.clamp(max=num_per_side - 1))
    return bucket + num_per_side * (offsets > 0)
