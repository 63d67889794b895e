"""gMLP and aMLP ("Pay Attention to MLPs", arXiv 2105.08050; Figures 1 and 6, equations 1 to 4).

    y = LayerNorm(x)
    z = gelu(y U)                                   # d_model -> d_ffn
    z1, z2 = split(z)                               # for the split gating, the paper's Spatial Gating Unit
    gate = W LayerNorm(z2) + b + TinyAttention(y)   # over positions, none at <pad>; only aMLP has the attention
    x + (z1 * gate) V                               # beside it the channels of z that bypass the gating, if any

Shape suffixes: B batch, N positions, D width, F expanded width, S its share that the gating takes, P its part that
bypasses the gating, G gate width (S / 2 if split, else S), K head width.
"""

import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from gmlp_scale.fields import FreeOnResume, Positive
from gmlp_scale.kernels.fused_gating import fused_gating
from gmlp_scale.models.attention import SelfAttention
from gmlp_scale.models.layers import FamilyConfig, LayerNorm, RowOffsets, Width, spatial_part, toeplitz

Spatial = Literal["toeplitz", "dense", "dynamic_toeplitz"]
Gating = Literal["linear", "additive", "multiplicative", "multiplicative_split"]
FUSED_FORM = "gating multiplicative_split, a W that is not dynamic and mixed_share 1"
"""The only form that has fused kernels."""
SPATIAL_INIT_SCALE = 0.002
"""std(W) * sqrt(n) at the start. The paper says "near-zero" and gives no number. The normalised operand has unit
variance, so this is also the root mean square of W LayerNorm(Z). The additive gating adds that to the hidden layer,
which is about 0.1 to 0.3 at the start, so it must be small."""


class GmlpConfig(FamilyConfig):
    display_name: ClassVar[str] = "gMLP"
    can_be_causal: ClassVar[bool] = True
    has_spatial_filters: ClassVar[bool] = True
    kind: Literal["gmlp"] = "gmlp"
    """gMLP: the Spatial Gating Unit alone mixes the positions."""
    d_ffn: Width
    """Width after the channel expansion, before any split. [channels]"""
    spatial: Spatial = "toeplitz"
    """W from one number per offset (the paper's choice for text), or a free n x n matrix (images). dynamic_toeplitz:
    the first, to which each row adds offsets of its own, from its content (Hydra's)."""
    gating: Gating = "multiplicative_split"
    """The variant of Table 3: s(Z) = f(Z), Z + f(Z), Z * f(Z), or Z1 * f(Z2)."""
    mixed_share: Annotated[Positive, Field(le=1)] = 1.0
    """The share of d_ffn that the gating takes (all in the paper), rounded to channels: an even number if the gating
    splits them. The rest bypasses it. [fraction]"""
    kernels: FreeOnResume[Literal["auto", "torch", "triton"]] = "auto"
    """What computes the Spatial Gating Unit: plain PyTorch, or the fused kernels of gmlp_scale/kernels, which need
    gating multiplicative_split, a W that is not dynamic, mixed_share 1, no causal mask and a CUDA device. auto: the
    kernels in bfloat16 on a CUDA device where they can run, else PyTorch."""

    @model_validator(mode="after")
    def _fits_the_gating(self):
        if not self.d_mixed or (self.d_gate < self.d_mixed and self.d_mixed % 2):
            raise ValueError(f"d_ffn * mixed_share is {self.d_mixed}: make it positive, and even if it is split")
        if self.kernels == "triton" and not self.has_kernels:
            found = f"gating {self.gating}, spatial {self.spatial} and mixed_share {self.mixed_share}: set it to auto"
            raise ValueError(f"kernels triton is for {FUSED_FORM}, not {found}")
        return self

    @property
    def has_kernels(self) -> bool:
        """Whether the block has FUSED_FORM."""
        return self.gating == "multiplicative_split" and self.spatial != "dynamic_toeplitz" and self.mixed_share == 1

    @property
    def d_mixed(self) -> int:
        """Width of what the gating takes."""
        return round(self.d_ffn * self.mixed_share)

    @property
    def d_gate(self) -> int:
        """Width of u and v, which are the halves of what the gating takes if it splits it; else both are that."""
        return self.d_mixed // 2 if self.gating.endswith("_split") else self.d_mixed

    @property
    def d_gated(self) -> int:
        """Width of the gating's result and of what bypasses it, side by side."""
        return self.d_gate + self.d_ffn - self.d_mixed

    @property
    def multiply_adds_per_block(self) -> int:
        """For one forward pass of one sequence: n (d f + (g + p) d) + n^2 g, and 2 n g for dynamic offsets."""
        n = self.sequence_length
        width = n + 2 if self.spatial == "dynamic_toeplitz" else n
        return n * self.d_model * (self.d_ffn + self.d_gated) + n * width * self.d_gate


class AmlpConfig(GmlpConfig):
    display_name: ClassVar[str] = "aMLP"
    kind: Literal["amlp"] = "amlp"
    """aMLP: gMLP with a tiny attention in each block."""
    d_attn: Width
    """Width of the tiny attention's single head. [channels]"""

    @property
    def multiply_adds_per_block(self) -> int:
        """gMLP's, and n (3 d a + a g) + 2 n^2 a for the tiny attention."""
        n, a = self.sequence_length, self.d_attn
        return super().multiply_adds_per_block + n * a * (3 * self.d_model + self.d_gate) + 2 * n * n * a


class GmlpBlock(nn.Module):
    """x_BND -> x_BND. With an AmlpConfig it has a tiny attention on its normalised input: one head (Figure 6)."""

    def __init__(self, config: GmlpConfig, dropout: float = 0.0, causal: bool = False):
        super().__init__()
        self.kernels = config.kernels if config.has_kernels and not causal else "torch"
        self.norm = LayerNorm(config.d_model)
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        self.gating = SpatialGatingUnit(
            config.d_mixed, config.sequence_length, spatial=config.spatial, gating=config.gating, causal=causal
        )
        self.d_mixed = config.d_mixed
        self.attention = None
        if isinstance(config, AmlpConfig):
            widths = {"d_attn": config.d_attn, "d_out": config.d_gate}
            self.attention = SelfAttention(config.d_model, 1, dropout, causal=causal, **widths)
        self.project = nn.Linear(config.d_gated, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        y_BND = self.norm(x_BND)
        gated_BNG = fused_gating(self.expand, y_BND, is_token_BN, self.gating, self.attention, self.kernels)
        if gated_BNG is None:  # the kernels are not for this case
            attended_BNG = None if self.attention is None else self.attention(y_BND, is_token_BN)
            z_BNS, bypass_BNP = F.gelu(self.expand(y_BND)).tensor_split([self.d_mixed], dim=-1)
            gated_BNG = self.gating(z_BNS, attended_BNG, is_token_BN)
            if bypass_BNP.shape[-1]:
                gated_BNG = torch.cat([gated_BNG, bypass_BNP], dim=-1)
        return x_BND + self.dropout(self.project(gated_BNG))

    def attention_weights(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        """weights_B1NN of the tiny attention, where the block's input is x_BND. Only an aMLP's block has them."""
        return self.attention.weights(self.norm(x_BND), is_token_BN)


class SpatialGatingUnit(nn.Module):
    """s(Z) of equations 2 to 4 and Table 3, with f(Z) = W LayerNorm(Z) + b: one W for all channels, one b per position.

    z_BNF has at most n = sequence_length positions and F = d_ffn; s(Z) is half as wide with the split gating.
    `weight` holds the 2n - 1 offsets of W (Toeplitz) or W itself (dense), `bias` the n numbers b. Both are initialised.
    A dynamic W is a row's own: `offsets` adds to `weight` what it computes from LayerNorm(Z), at first zeros.
    If causal, no position sees a later one: W's part above the diagonal is never read.
    """

    def __init__(
        self,
        d_ffn: int,
        sequence_length: int,
        *,
        spatial: Spatial = "toeplitz",
        gating: Gating = "multiplicative_split",
        causal: bool = False,
    ):
        super().__init__()
        n = self.sequence_length = sequence_length
        self.spatial, self.gating, self.causal = spatial, gating, causal
        self.splits = gating.endswith("_split")
        self.norm = LayerNorm(d_ffn // 2 if self.splits else d_ffn)
        self.weight = nn.Parameter(torch.empty(n, n) if spatial == "dense" else torch.empty(2 * n - 1))
        self.offsets = RowOffsets(self.norm.weight.numel()) if spatial == "dynamic_toeplitz" else None
        self.bias = nn.Parameter(torch.empty(n))
        self.init_special_weights(torch.default_generator)  # build_model skips its random numbers

    def forward(self, z_BNF: Tensor, attended_BNG: Tensor | None = None, is_token_BN: Tensor | None = None) -> Tensor:
        """s(Z) for z after GELU. Attended values are added to the gate. W reads 0 where is_token_BN is False.

        Where b is float32 beside a bfloat16 z, the gate is float32 until it has met u: bfloat16 has steps of 0.008 just
        above b's initial 1, and W's part of the gate is smaller than that.
        bmm takes W with batch stride 0. A Linear over positions, matmul or einsum would copy v transposed, twice.
        """
        u_BNG, v_BNG = z_BNF.chunk(2, dim=-1) if self.splits else (z_BNF, z_BNF)
        v_BNG = self.norm(v_BNG)
        if is_token_BN is not None:
            v_BNG = v_BNG * is_token_BN[:, :, None]
        weight_NN, bias_N = self.spatial_weights(z_BNF.shape[1], v_BNG)
        weight_BNN = weight_NN.to(z_BNF.dtype).expand(z_BNF.shape[0], *weight_NN.shape[-2:])
        gate_BNG = torch.bmm(weight_BNN, v_BNG) + bias_N[:, None]
        if attended_BNG is not None:
            gate_BNG = gate_BNG + attended_BNG
        if self.gating != "linear":
            gate_BNG = u_BNG + gate_BNG if self.gating == "additive" else u_BNG * gate_BNG
        return gate_BNG.to(z_BNF.dtype)

    def spatial_weights(self, num_positions: int, v_BNG: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """weight_NN and bias_N: W and b for the first m <= n positions. A dynamic W, weight_BNN, is that of v_BNG."""
        weight, bias_N = self.central_part(num_positions)
        if self.offsets is not None:
            weight = weight + RowOffsets.arranged(self.offsets(v_BNG) / v_BNG.shape[-1])
        weight_NN = weight if self.spatial == "dense" else toeplitz(weight)
        return weight_NN.tril() if self.causal else weight_NN, bias_N

    def central_part(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """`weight` and `bias` for the first m <= n positions."""
        return spatial_part(self.weight, num_positions), self.bias[:num_positions]

    @torch.no_grad()
    def init_special_weights(self, generator: torch.Generator) -> None:
        """Starts the block as a feed-forward layer: W near zero, and b such that s(Z) is Z, or Z1 if split.

        The linear gating passes nothing but f(Z), so its W starts near the identity with b zero. The block is then a
        feed-forward layer whose hidden layer is normalised. (W near zero and b one would make it a constant.)
        """
        noise = torch.empty(self.weight.shape, device="cpu")
        nn.init.normal_(noise, generator=generator)  # which transformers 4 replaces by a function that returns nothing
        self.weight.copy_(noise * (SPATIAL_INIT_SCALE / math.sqrt(self.sequence_length)))
        if self.gating == "linear":
            diagonal = self.weight.diagonal() if self.spatial == "dense" else self.weight[self.sequence_length - 1]
            diagonal.add_(1.0)
        self.bias.fill_(1.0 if self.gating.startswith("multiplicative") else 0.0)
