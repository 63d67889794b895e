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
There all weights start by Glorot's rule, here all but W and the ranker's map from N(0, 0.02) as in all families. For
the Linear layers both are about alike at the width of 768; at 128 Glorot's are three times as large and learn more
slowly. Glorot's embedding is smaller, 0.006 for the authors' base model.

v is not negative, so neither are the similarities, and each row of a dynamic W is a mean. Dynamic layers treat the
positions alike: a model of them alone does not know the order of its tokens. Padding is zero in v, so a static W reads
zeros there and no similarity to it counts; the authors' file sets no more than the embeddings of padding to zero.

Layers mix within chunks of S positions, and the ranker, before the first one, brings each chunk what it needs from the
k earlier ones that are most alike. So no chunk sees a later one. A row of n tokens costs each layer n S g in place of
n^2 g multiply-adds, and the ranker once n^2 d for the cosines, C k n d for the choice and n (k + 1) S d for its map.
Without `chunk_length` there is no ranker; the authors' file always has it.

Shape suffixes: B batch, N positions, D width, F expanded width, G width of v and of the gate, P width of the bypass,
C chunks, S positions of a chunk, K ranked chunks.
"""

import math
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from gmlp_scale.fields import Count, Positive
from gmlp_scale.models.layers import FamilyConfig, RMSNorm, Width, spatial_part, toeplitz

EPS = 1e-12
"""Of the norms, the cosines and the sums of rows."""


class AveyConfig(FamilyConfig):
    display_name: ClassVar[str] = "Avey"
    blocks_differ: ClassVar[bool] = True
    kind: Literal["avey"] = "avey"
    """Avey-B's layers, and its ranker where chunk_length is set."""
    masks_padding: Literal[True] = True
    """No position reads <pad>."""
    d_ffn: Width
    """Width after the channel expansion, before the split. [channels]"""
    layers: Literal["alternate", "static", "dynamic"] = "alternate"
    """alternate: static and dynamic in turn, static first. static, dynamic: all alike. Dynamic ones alone do not know
    the order of the tokens."""
    spatial: Literal["dense", "toeplitz"] = "dense"
    """W of a static layer: a free S x S matrix (the authors' choice), or one number per offset (gMLP's for text)."""
    mixed_share: Positive = 0.5
    """The share of d_ffn that is mixed over positions, at most 1: half of it is mixed, half is its gate. The rest
    bypasses both. An odd width becomes the next even one. [fraction]"""
    chunk_length: Width | None = None
    """S: a row is cut into chunks of so many positions, and layers mix within them. sequence_length is a multiple of
    it. null: a row is one chunk, and there is no ranker. [tokens]"""
    ranked_chunks: Count | None = None
    """k: how many earlier chunks the ranker brings to each one, fewer than a row has. [chunks]"""

    @model_validator(mode="after")
    def _fits_the_share(self):
        if not 0 < 2 * self.d_gate <= self.d_ffn:
            found = f"d_ffn is {self.d_ffn} and mixed_share {self.mixed_share}"
            raise ValueError(f"{found}: {2 * self.d_gate} channels would be mixed; needed: from 2 to d_ffn")
        return self

    @model_validator(mode="after")
    def _chunks_fill_the_row(self):
        if (self.chunk_length is None) != (self.ranked_chunks is None):
            raise ValueError("chunk_length and ranked_chunks go together: set both or neither")
        if self.chunk_length and (self.sequence_length % self.chunk_length or self.ranked_chunks >= self.num_chunks):
            found = f"sequence_length is {self.sequence_length}, chunk_length {self.chunk_length}"
            needed = "a multiple of chunk_length with more chunks than ranked_chunks"
            raise ValueError(f"{found} and ranked_chunks {self.ranked_chunks}; needed: {needed}")
        return self

    @property
    def span(self) -> int:
        """The positions that a layer mixes."""
        return min(self.chunk_length or self.sequence_length, self.sequence_length)

    @property
    def num_chunks(self) -> int:
        """Of the longest row."""
        return math.ceil(self.sequence_length / self.span)

    @property
    def d_gate(self) -> int:
        """Width of v, and of its gate."""
        return math.ceil(int(self.d_ffn * self.mixed_share) / 2)

    def is_static(self, index: int) -> bool:
        """Whether a block has a free W; counted from 0."""
        return self.layers == "static" or (self.layers == "alternate" and index % 2 == 0)

    @property
    def multiply_adds_per_block(self) -> float:
        """For one forward pass of one sequence: n d (2 f - g) + n S g, and n S g for the similarities of a dynamic
        layer; n d (n + C k + (k + 1) S) for the ranker. The mean over the blocks."""
        n, d, g, span = self.sequence_length, self.d_model, self.d_gate, self.span
        num_dynamic = sum(not self.is_static(index) for index in range(self.num_blocks))
        mixing = n * span * g * (self.num_blocks + num_dynamic)
        k = self.ranked_chunks
        ranking = n * d * (n + self.num_chunks * k + (k + 1) * span) if k else 0
        return n * d * (2 * self.d_ffn - g) + (mixing + ranking) / self.num_blocks

    def new_norm(self) -> nn.Module:
        return RMSNorm(self.d_model, eps=EPS)


class AveyBlock(nn.Module):
    """One layer, x_BND -> x_BND. `index`, from 0, says whether it is static. Then `spatial` is its W, S x S, or that
    W's 2S - 1 offsets. The first block has the ranker."""

    def __init__(self, config: AveyConfig, dropout: float = 0.0, *, index: int):
        super().__init__()
        n, g = config.span, config.d_gate
        self.span = n
        self.ranker = Ranker(n, config.ranked_chunks) if config.ranked_chunks and index == 0 else None
        self.widths = [g, g, config.d_ffn - 2 * g]
        self.norm = config.new_norm()
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        shape = (n, n) if config.spatial == "dense" else (2 * n - 1,)
        self.spatial = nn.Parameter(torch.empty(shape)) if config.is_static(index) else None
        self.project = nn.Linear(config.d_ffn - g, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        if self.ranker is None and x_BND.shape[1] <= self.span:  # one chunk
            return self.mixed(x_BND, is_token_BN)
        num_rows, num_positions, _ = x_BND.shape
        if num_missing := -num_positions % self.span:
            if is_token_BN is None:
                is_token_BN = x_BND.new_ones(num_rows, num_positions, dtype=torch.bool)
            x_BND, is_token_BN = F.pad(x_BND, (0, 0, 0, num_missing)), F.pad(is_token_BN, (0, num_missing))
        chunks = (-1, self.span)
        if self.ranker is not None:
            x_BND = self.ranker(x_BND, is_token_BN)
        is_token_CS = None if is_token_BN is None else is_token_BN.unflatten(1, chunks).flatten(0, 1)
        x_CSD = self.mixed(x_BND.unflatten(1, chunks).flatten(0, 1), is_token_CS)
        return x_CSD.unflatten(0, (num_rows, -1)).flatten(1, 2)[:, :num_positions]

    def mixed(self, x_BND: Tensor, is_token_BN: Tensor | None) -> Tensor:
        """The layer, whose W spans the positions that it is given."""
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
        """W from N(0, 1 / sqrt(S)), Glorot's normal distribution, as the authors' file has it."""
        if self.spatial is not None:
            noise = torch.randn(self.spatial.shape, generator=generator, device="cpu")
            self.spatial.copy_(noise / math.sqrt(self.span))


class Ranker(nn.Module):
    """x_BND -> x_BND: adds to each chunk what a map takes from it and from the k earlier chunks that are most alike.

    An earlier chunk's score is the sum, over the positions of this one, of each one's largest cosine with a position
    there. The k best stand side by side, the best first, each times its score over the lowest of the k, and then the
    chunk itself. Where there are fewer, zeros stand before them. `map`, S x (k + 1) S, is the same for all channels.
    """

    def __init__(self, chunk_length: int, ranked_chunks: int):
        super().__init__()
        self.ranked_chunks = ranked_chunks
        self.map = nn.Parameter(torch.empty(chunk_length, (ranked_chunks + 1) * chunk_length))

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """N is a multiple of S."""
        if is_token_BN is not None:
            x_BND = x_BND * is_token_BN[:, :, None]
        x_BCSD = x_BND.unflatten(1, (-1, len(self.map)))
        choice_BCKC = ranking(x_BND, is_token_BN, x_BCSD.shape[1], self.ranked_chunks)
        ranked = torch.bmm(choice_BCKC.flatten(1, 2), x_BCSD.flatten(2))
        own = x_BCSD.flatten(0, 1)
        read = torch.cat([ranked.view(len(own), -1, x_BND.shape[2]), own], dim=1)
        added = torch.bmm(self.map.to(x_BND.dtype).expand(len(read), *self.map.shape), read)
        return x_BND + added.view(x_BND.shape)

    @torch.no_grad()
    def init_special_weights(self, generator: torch.Generator) -> None:
        """Glorot's normal distribution, as the authors' file has it."""
        noise = torch.randn(self.map.shape, generator=generator, device="cpu")
        self.map.copy_(noise * math.sqrt(2 / sum(self.map.shape)))


def cosines(x_BND: Tensor) -> Tensor:
    """cosines_BNN between all positions, in x's dtype. A position of zeros has the cosine 0 with all.

    Squares are added up in float32 or wider.
    """
    squares_BN1 = x_BND.square().sum(-1, keepdim=True, dtype=torch.promote_types(x_BND.dtype, torch.float32))
    unit_BND = (x_BND / (squares_BN1 + EPS).sqrt()).to(x_BND.dtype)
    return torch.bmm(unit_BND, unit_BND.mT)


def similarities(v_BNG: Tensor) -> Tensor:
    """weight_BNN of a dynamic layer, in v's dtype: the cosines of each position (second axis) with all, over their sum.

    Sums are added up in float32 or wider.
    """
    cosines_BNN = cosines(v_BNG)
    sums_BN1 = cosines_BNN.sum(-1, keepdim=True, dtype=torch.promote_types(v_BNG.dtype, torch.float32))
    return (cosines_BNN / (sums_BN1 + EPS)).to(v_BNG.dtype)


def ranking(x_BND: Tensor, is_token_BN: Tensor | None, num_chunks: int, k: int) -> Tensor:
    """choice_BCKC: for each chunk (second axis), the factor that every chunk has in each of its k places, one or no
    chunk in each. A product with it takes the chunks; a gather's gradient would be added up in any order.
    """
    cosines_BNN = cosines(x_BND)
    if is_token_BN is not None:
        cosines_BNN = cosines_BNN.masked_fill(~is_token_BN[:, None], -math.inf)
    nearest_BNC = cosines_BNN.unflatten(2, (num_chunks, -1)).max(-1).values  # amax would keep the cosines
    sum_in = torch.promote_types(x_BND.dtype, torch.float32)
    scores_BCC = nearest_BNC.unflatten(1, (num_chunks, -1)).sum(2, dtype=sum_in)
    chunks = torch.arange(num_chunks, device=x_BND.device)
    earlier_BCC = scores_BCC.masked_fill(chunks >= chunks[:, None], -math.inf)
    places = torch.arange(k, device=x_BND.device)
    is_empty_BCK = places < k - (earlier_BCC > -math.inf).sum(-1, keepdim=True)  # the first ones
    empty_BCK = torch.where(is_empty_BCK, math.inf, -math.inf)
    scores_BCK, numbers_BCK = torch.cat([earlier_BCC, empty_BCK], dim=2).topk(k)
    scores_BCK = scores_BCK.masked_fill(is_empty_BCK, 1.0)
    factor_BCK = scores_BCK / (scores_BCK[..., -1:] + EPS)
    return torch.where(numbers_BCK[..., None] == chunks, factor_BCK[..., None], 0.0).to(x_BND.dtype)
