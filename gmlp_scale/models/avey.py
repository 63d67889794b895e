"""Avey-B (Acharya and Hammoud 2026, arXiv 2602.15814): static and dynamic layers, without attention.

    z = relu(RMSNorm(x) U + b)^2                    # enricher, d_model -> d_ffn
    v, gate, bypass = split(z)                      # v and gate, of equal width, are the share that is mixed
    static:   W is a free n x n matrix, or has one number per offset
    dynamic:  S[i, j] = cos(v_i, v_j),  W[i, j] = S[i, j] / sum over k of S[i, k]
    x + [(W v) * gate, bypass] V + c                # contextualizer and fuser

The order of operations and the epsilons are those of the authors' model file at the paper's publication
(github.com/rimads/avey-b, commit eb6a7c5); with the same weights the logits are the same. The file was replaced five
days later (8f3ed57, "for consistency" with the published models) by one with GELU, a factor on each residual sum and no
final norm, whose weights are not for this family. The paper's text was not at hand, so no equation has its number.
There all weights start by Glorot's rule, here all but W from N(0, 0.02) as in all families. For the Linear layers both
are about alike at the width of 768; at 128 Glorot's are three times as large and learn more slowly. Glorot's embedding
is smaller, 0.006 for the authors' base model.

v is not negative, so neither are the similarities, and each row of a dynamic W is a mean. Dynamic layers treat the
positions alike: a model of them alone does not know the order of its tokens. Padding is zero in v, so a static W reads
zeros there and no similarity to it counts; the authors' file sets no more than the embeddings of padding to zero.

Rows are at most one chunk long here: the ranker is left out, which gives each chunk of S tokens what it needs from the
k earlier chunks that are most alike. For a row of n > S tokens it would cost n^2 d / 2 multiply-adds for the cosines of
all pairs, once in the model, and n (k + 1) S d for the map from k + 1 chunks to one, which has (k + 1) S^2 parameters.
The layers then cost n S instead of n^2. Authors' models also apply that map, S x S then, to a row of one chunk.

Shape suffixes: B batch, N positions, D width, F expanded width, G width of v and of the gate, P width of the bypass.
"""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gmlp_scale.fields import Positive
from gmlp_scale.models.layers import FamilyConfig, RMSNorm, Width, spatial_part, toeplitz

EPS = 1e-12
"""Of the norms, the cosines and the sums of rows."""


class AveyConfig(FamilyConfig):
    display_name: ClassVar[str] = "Avey"
    blocks_differ: ClassVar[bool] = True
    kind: Literal["avey"] = "avey"
    """Avey-B's layers, within one chunk."""
    masks_padding: Literal[True] = True
    """No position reads <pad>."""
    d_ffn: Width
    """Width after the channel expansion, before the split. [channels]"""
    layers: Literal["alternate", "static", "dynamic"] = "alternate"
    """alternate: static and dynamic in turn, static first. static, dynamic: all alike. Dynamic ones alone do not know
    the order of the tokens."""
    spatial: Literal["dense", "toeplitz"] = "dense"
    """W of a static layer: a free n x n matrix (the authors' choice), or one number per offset (gMLP's for text)."""
    mixed_share: Positive = 0.5
    """The share of d_ffn that is mixed over positions, at most 1: half of it is mixed, half is its gate. The rest
    bypasses both. An odd width becomes the next even one. [fraction]"""

    @model_validator(mode="after")
    def _fits_the_share(self):
        if not 0 < 2 * self.d_gate <= self.d_ffn:
            found = f"d_ffn is {self.d_ffn} and mixed_share {self.mixed_share}"
            raise ValueError(f"{found}: {2 * self.d_gate} channels would be mixed; needed: from 2 to d_ffn")
        return self

    @property
    def d_gate(self) -> int:
        """Width of v, and of its gate."""
        return math.ceil(int(self.d_ffn * self.mixed_share) / 2)

    def is_static(self, index: int) -> bool:
        """Whether a block has a free W; counted from 0."""
        return self.layers == "static" or (self.layers == "alternate" and index % 2 == 0)

    @property
    def multiply_adds_per_block(self) -> float:
        """For one forward pass of one sequence: n d (2 f - g) + n^2 g, and n^2 g for the similarities of a dynamic
        layer. The mean over the blocks."""
        n, g = self.sequence_length, self.d_gate
        num_dynamic = sum(not self.is_static(index) for index in range(self.num_blocks))
        return n * self.d_model * (2 * self.d_ffn - g) + n * n * g * (self.num_blocks + num_dynamic) / self.num_blocks

    def new_norm(self) -> nn.Module:
        return RMSNorm(self.d_model, eps=EPS)


class AveyBlock(nn.Module):
    """One layer, x_BND -> x_BND. `index`, from 0, says whether it is static. Then `spatial` is its W, n x n, or that
    W's 2n - 1 offsets."""

    def __init__(self, config: AveyConfig, dropout: float = 0.0, *, index: int):
        super().__init__()
        n, g = config.sequence_length, config.d_gate
        self.widths = [g, g, config.d_ffn - 2 * g]
        self.norm = config.new_norm()
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        shape = (n, n) if config.spatial == "dense" else (2 * n - 1,)
        self.spatial = nn.Parameter(torch.empty(shape)) if config.is_static(index) else None
        self.sequence_length = n
        self.project = nn.Linear(config.d_ffn - g, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        expanded_BNF = F.relu(self.expand(self.norm(x_BND))).square()
        v_BNG, gate_BNG, bypass_BNP = expanded_BNF.split(self.widths, dim=-1)
        if is_token_BN is not None:
            v_BNG = v_BNG * is_token_BN[:, :, None]
        if self.spatial is None:
            weight_BNN = similarities(v_BNG)
        else:
            weight = spatial_part(self.spatial, x_BND.shape[1])
            weight_NN = weight if weight.ndim == 2 else toeplitz(weight)
            weight_BNN = weight_NN.to(v_BNG.dtype).expand(x_BND.shape[0], *weight_NN.shape)
        gated_BNG = torch.bmm(weight_BNN, v_BNG) * gate_BNG
        return x_BND + self.dropout(self.project(torch.cat([gated_BNG, bypass_BNP], dim=-1)))

    @torch.no_grad()
    def init_special_weights(self, generator: torch.Generator) -> None:
        """W from N(0, 1 / sqrt(n)), Glorot's normal distribution, as the authors' file has it."""
        if self.spatial is not None:
            noise = torch.randn(self.spatial.shape, generator=generator, device="cpu")
            self.spatial.copy_(noise / math.sqrt(self.sequence_length))


def similarities(v_BNG: Tensor) -> Tensor:
    """weight_BNN of a dynamic layer, in v's dtype: the cosines of each position (second axis) with all, over their sum.

    A v of zeros has the cosine 0 with all. Squares and sums are added up in float32 or wider.
    """
    sum_in = torch.promote_types(v_BNG.dtype, torch.float32)
    squares_BN1 = v_BNG.square().sum(-1, keepdim=True, dtype=sum_in)
    unit_BNG = (v_BNG / (squares_BN1 + EPS).sqrt()).to(v_BNG.dtype)
    cosines_BNN = torch.bmm(unit_BNG, unit_BNG.mT)
    sums_BN1 = cosines_BNN.sum(-1, keepdim=True, dtype=sum_in)
    return (cosines_BNN / (sums_BN1 + EPS)).to(v_BNG.dtype)
