"""MLP-Mixer (arXiv 2105.01601) for masked language modelling, as in the fourth line of the paper's Table 3.

    x = x + (W2 gelu(W1 LayerNorm(x) + b1) + b2)    # over positions, the same for every channel
    x = x + gelu(LayerNorm(x) U) V                  # over channels, the same for every position

In padded rows the first LayerNorm(x) is 0 at <pad>.

Shape suffixes: B batch, N positions, D width, S hidden width of the network over positions.
"""

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.models.layers import FamilyConfig, LayerNorm, Width, leading


class MixerConfig(FamilyConfig):
    display_name: ClassVar[str] = "MLP-Mixer"
    kind: Literal["mixer"] = "mixer"
    """MLP-Mixer: a two-layer network over positions, then one over channels."""
    d_spatial: Width
    """Hidden width of the two-layer network over positions. [channels]"""
    d_ffn: Width
    """Hidden width of the two-layer network over channels. [channels]"""

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: 2 n d s + 2 n d f."""
        return 2 * self.sequence_length * self.d_model * (self.d_spatial + self.d_ffn)


class MixerBlock(nn.Module):
    """x_BND -> x_BND. Shorter rows take the leading part of the matrices over positions."""

    def __init__(self, config: MixerConfig, dropout: float = 0.0):
        super().__init__()
        self.spatial_norm = LayerNorm(config.d_model)
        self.spatial_expand = nn.Linear(config.sequence_length, config.d_spatial)
        self.spatial_project = nn.Linear(config.d_spatial, config.sequence_length)
        self.norm = LayerNorm(config.d_model)
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        self.project = nn.Linear(config.d_ffn, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        num_positions = x_BND.shape[1]
        y_BND = self.spatial_norm(x_BND)
        if is_token_BN is not None:
            y_BND = y_BND * is_token_BN[:, :, None]
        expand, project = self.spatial_expand, self.spatial_project
        hidden_BDS = F.gelu(F.linear(y_BND.transpose(1, 2), leading(expand.weight, num_positions, 1), expand.bias))
        mixed_BDN = F.linear(hidden_BDS, leading(project.weight, num_positions, 0), project.bias[:num_positions])
        x_BND = x_BND + self.dropout(mixed_BDN.transpose(1, 2))
        return x_BND + self.dropout(self.project(F.gelu(self.expand(self.norm(x_BND)))))
