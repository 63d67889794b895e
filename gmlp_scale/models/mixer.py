"""MLP-Mixer (arXiv 2105.01601) for masked language modelling, as in the fourth line of the paper's Table 3.

    x = x + (W2 gelu(W1 LayerNorm(x) + b1) + b2)    # over positions, the same for every channel
    x = x + gelu(LayerNorm(x) U) V                  # over channels, the same for every position

Shape suffixes: B batch, N positions, D width.
"""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.models.layers import FamilyConfig, LayerNorm, NumBlocks, VocabSize, Width


class MixerConfig(FamilyConfig):
    display_name: ClassVar[str] = "MLP-Mixer"
    kind: Literal["mixer"] = "mixer"
    """MLP-Mixer: a two-layer network over positions, then one over channels."""
    num_blocks: NumBlocks
    """Mixer layers, each mixing positions and then channels. [blocks]"""
    d_model: Width
    """Width of the residual stream. [channels]"""
    d_spatial: Width
    """Hidden width of the two-layer network over positions. [channels]"""
    d_ffn: Width
    """Hidden width of the two-layer network over channels. [channels]"""
    sequence_length: Width
    """Positions n that the network over positions is made for; shorter inputs take its leading part. [tokens]"""
    vocab_size: VocabSize
    """Rows of the embedding, as many as the tokenizer has pieces. [pieces]"""

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: 2 n d s + 2 n d f."""
        return 2 * self.sequence_length * self.d_model * (self.d_spatial + self.d_ffn)


class MixerBlock(nn.Module):
    """x_BND -> x_BND."""

    def __init__(self, config: MixerConfig, dropout: float = 0.0):
        super().__init__()
        self.spatial_norm = LayerNorm(config.d_model)
        self.spatial_expand = nn.Linear(config.sequence_length, config.d_spatial)
        self.spatial_project = nn.Linear(config.d_spatial, config.sequence_length)
        self.norm = LayerNorm(config.d_model)
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        self.project = nn.Linear(config.d_ffn, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        num_positions = x_BND.shape[1]
        y_BDN = self.spatial_norm(x_BND).transpose(1, 2)
        # Shorter rows are padded with zeros, so that the unused columns of the first matrix have no effect.
        y_BDN = F.pad(y_BDN, (0, self.spatial_expand.in_features - num_positions))
        mixed_BDN = self.spatial_project(F.gelu(self.spatial_expand(y_BDN)))[..., :num_positions]
        x_BND = x_BND + self.dropout(mixed_BDN.transpose(1, 2))
        return x_BND + self.dropout(self.project(F.gelu(self.expand(self.norm(x_BND)))))
