"""MLP-Attention (Morsali et al. 2023) and the Transformer that its paper compares it with.

    x = x + Attention(LayerNorm(x))
    x = x + relu(LayerNorm(x) U) V

The attention's weights are a softmax over positions. `dot_product` takes them from queries and keys. `mlp` computes
them from the querying position alone, with a multi-layer perceptron: score j is that of the absolute position j, and no
key is read (the Dense Synthesizer of Tay et al. 2020). Shorter rows use the first scores.

Shape suffixes: B batch, N positions, D width, H heads, K head width, S hidden width of the perceptron.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gmlp_scale.models.attention import AttentionBlock, AttentionConfig, SelfAttention, attention_mask
from gmlp_scale.models.backbone import INIT_STD
from gmlp_scale.models.layers import Width, flatten_heads, leading


class MlpAttentionConfig(AttentionConfig):
    display_name: ClassVar[str] = "MLP-Attention"
    has_absolute_positions: ClassVar[bool] = True
    can_be_causal: ClassVar[bool] = True
    kind: Literal["mlp_attention"] = "mlp_attention"
    """MLP-Attention, whose attention takes its weights from a multi-layer perceptron."""
    d_ffn: Width
    """Width of the feed-forward part's hidden layer. [channels]"""
    scores: Literal["mlp", "dot_product"] = "mlp"
    """Where the attention's weights come from. dot_product is the Transformer that the paper compares with."""
    d_scores: Width | None = None
    """Width of the hidden layer that computes a head's scores; for `mlp` only. [channels]"""

    @model_validator(mode="after")
    def _fits_the_scores(self):
        if (self.scores == "mlp") != (self.d_scores is not None):
            raise ValueError(f"d_scores is {self.d_scores} with scores {self.scores}: only mlp has one, and needs it")
        return self

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: n (2 d^2 + 2 d f) + n^2 d, and the scores: n d h s + n^2 h s for `mlp`,
        2 n d^2 + n^2 d for `dot_product`."""
        n, d = self.sequence_length, self.d_model
        width = self.num_heads * self.d_scores if self.scores == "mlp" else d
        scores = n * d * width + n * n * width + (n * d * d if self.scores == "dot_product" else 0)
        return scores + n * (2 * d * d + 2 * d * self.d_ffn) + n * n * d


class MlpAttentionBlock(AttentionBlock):
    def __init__(self, config: MlpAttentionConfig, dropout: float = 0.0, causal: bool = False):
        if config.scores == "mlp":
            attention = MlpAttention(config, dropout, causal)
        else:
            attention = SelfAttention(config.d_model, config.num_heads, dropout, qkv_bias=False, causal=causal)
        super().__init__(attention, config.d_model, config.d_ffn, dropout, F.relu)


class MlpAttention(nn.Module):
    """softmax(relu(x W1 + b1) W2) v for each head. W2 has a column for each absolute position, and no bias."""

    def __init__(self, config: MlpAttentionConfig, dropout: float, causal: bool):
        super().__init__()
        self.num_heads, self.causal = config.num_heads, causal
        self.hidden = nn.Linear(config.d_model, config.num_heads * config.d_scores)
        self.scores_HSN = nn.Parameter(torch.empty(config.num_heads, config.d_scores, config.sequence_length))
        self.value = nn.Linear(config.d_model, config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        v_BHNK = self.value(x_BND).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        weights_BHNN = self.weights(x_BND, is_token_BN).to(x_BND.dtype)
        return self.out(flatten_heads(self.dropout(weights_BHNN) @ v_BHNK))

    def weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """The softmax as weights_BHNN, float32 or wider: what each position (third axis) takes from each (fourth)."""
        num_positions = x_BND.shape[1]
        hidden_BHNS = F.relu(self.hidden(x_BND)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        scores_BHNN = hidden_BHNS @ leading(self.scores_HSN, num_positions, -1)
        mask = attention_mask(num_positions, is_token_BN, self.causal, x_BND.device)
        if mask is not None:
            scores_BHNN = scores_BHNN.masked_fill(~mask, -torch.inf)
        return scores_BHNN.softmax(-1, dtype=torch.promote_types(x_BND.dtype, torch.float32))

    @torch.no_grad()
    def init_special_weights(self, generator: torch.Generator) -> None:
        noise = torch.randn(self.scores_HSN.shape, generator=generator, device="cpu")
        self.scores_HSN.copy_(noise * INIT_STD)
