"""gMLP and aMLP ("Pay Attention to MLPs", arXiv 2105.08050; Figures 1 and 6, equations 1 to 4).

    y = LayerNorm(x)
    z = gelu(y U)                                   # d_model -> d_ffn
    z1, z2 = split(z)                               # for the split gating, the paper's Spatial Gating Unit
    gate = W LayerNorm(z2) + b + TinyAttention(y)   # over positions; the attention in aMLP only
    x + (z1 * gate) V

Shape suffixes: B batch, N positions, D width, F expanded width, G gate width (F / 2 if split, else F), K head width.
"""

import importlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, PositiveInt, model_validator
from torch import Tensor, nn

from gmlp_scale.models.toeplitz import toeplitz

Gating = Literal["linear", "additive", "multiplicative", "multiplicative_split"]

SPATIAL_INIT_SCALE = 0.002
"""std(W) * sqrt(n) at the start. The paper says "near-zero" and gives no number. The normalised operand has unit
variance, so this is also the root mean square of W LayerNorm(Z); it stays small beside the hidden layer (about 0.1 to
0.3 at the start) to which the additive gating adds it."""


class GmlpConfig(BaseModel, frozen=True, extra="forbid"):
    kind: Literal["gmlp"] = "gmlp"
    num_blocks: PositiveInt
    """gMLP blocks; each is one layer (36 at the size of BERT base)."""
    d_model: PositiveInt
    """Width of the residual stream."""
    d_ffn: PositiveInt
    """Width after the channel expansion, before any split."""
    spatial: Literal["toeplitz", "dense"] = "toeplitz"
    """W from one number per offset (the paper's choice for text), or a free n x n matrix (images)."""
    gating: Gating = "multiplicative_split"
    """The variant of Table 3: s(Z) = f(Z), Z + f(Z), Z * f(Z), or Z1 * f(Z2)."""
    sequence_length: PositiveInt
    """Positions n that the spatial projection is made for; shorter inputs take its central part."""
    vocab_size: PositiveInt
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """What computes the Spatial Gating Unit: plain PyTorch, or the fused kernels of gmlp_scale/kernels, which are for
    gating multiplicative_split on CUDA devices. auto: the kernels there in bfloat16, plain PyTorch for all else."""

    @model_validator(mode="after")
    def _fits_the_gating(self):
        if self.gating == "multiplicative_split" and self.d_ffn % 2:
            raise ValueError(f"d_ffn is {self.d_ffn}: gating multiplicative_split halves it, so make it even")
        if self.gating != "multiplicative_split" and self.kernels == "triton":
            raise ValueError(f"kernels triton is for gating multiplicative_split, not {self.gating}: set it to auto")
        return self

    @property
    def d_gate(self) -> int:
        return self.d_ffn // 2 if self.gating == "multiplicative_split" else self.d_ffn

    @property
    def multiply_adds_per_block(self) -> int:
        """Of one forward pass of one sequence: n (d f + g d) + n^2 g."""
        n = self.sequence_length
        return n * self.d_model * (self.d_ffn + self.d_gate) + n * n * self.d_gate


class AmlpConfig(GmlpConfig, frozen=True, extra="forbid"):
    kind: Literal["amlp"] = "amlp"
    d_attn: PositiveInt
    """Width of the tiny attention's single head."""

    @property
    def multiply_adds_per_block(self) -> int:
        """gMLP's, and n (3 d a + a g) + 2 n^2 a for the tiny attention."""
        n, a = self.sequence_length, self.d_attn
        return super().multiply_adds_per_block + n * a * (3 * self.d_model + self.d_gate) + 2 * n * n * a


class GmlpBlock(nn.Module):
    """x_BND -> x_BND. With an AmlpConfig it holds a TinyAttention on the block's normalised input (Figure 6)."""

    def __init__(self, config: GmlpConfig, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.expand = nn.Linear(config.d_model, config.d_ffn)
        self.gating = SpatialGatingUnit(config)
        self.attention = (
            TinyAttention(config.d_model, config.d_attn, config.d_gate, dropout)
            if isinstance(config, AmlpConfig)
            else None
        )
        self.project = nn.Linear(config.d_gate, config.d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BND: Tensor) -> Tensor:
        y_BND = self.norm(x_BND)
        z_BNF = self.expand(y_BND)
        if self.attention is None:
            gated_BNG = self.gating(z_BNF)
        else:
            gated_BNG = self.gating(z_BNF, self.attention(y_BND), self.attention.out)
        return x_BND + self.dropout(self.project(gated_BNG))


class SpatialGatingUnit(nn.Module):
    """s(Z) of equations 2 to 4 and Table 3, f(Z) = W LayerNorm(Z) + b: one W for all channels, one b per position.

    `weight` holds the 2n - 1 offsets of W (Toeplitz) or W itself (dense), `bias` the n numbers b.
    """

    def __init__(self, config: GmlpConfig):
        super().__init__()
        n = config.sequence_length
        self.variant = config.gating
        self.spatial = config.spatial
        self.kernels = config.kernels
        self.sequence_length = n
        self.norm = nn.LayerNorm(config.d_gate)
        self.weight = nn.Parameter(torch.empty(2 * n - 1) if config.spatial == "toeplitz" else torch.empty(n, n))
        self.bias = nn.Parameter(torch.empty(n))
        self.built: tuple[tuple[int, int, int], Tensor, Tensor] | None = None  # W for inference, after its origin
        if config.kernels != "torch":
            # By name, not by an import statement: exports hold this file without the kernels and never come here.
            importlib.import_module("gmlp_scale.kernels.spatial_gating_unit")

    @torch.no_grad()
    def init_special_weights(self, generator: torch.Generator) -> None:
        """Starts the block as a feed-forward layer: s(Z) = Z, or Z1 if split, but for SPATIAL_INIT_SCALE.

        W is near zero. b is one where the gate multiplies, and zero where it is added to Z. The linear gating passes
        nothing but f(Z), so its W starts near the identity with b zero: a feed-forward layer whose hidden layer is
        normalised. (W near zero and b one would make each such block a constant.)
        """
        n = self.sequence_length
        noise = torch.randn(self.weight.shape, generator=generator, device="cpu")
        self.weight.copy_(noise * (SPATIAL_INIT_SCALE / math.sqrt(n)))
        if self.variant == "linear":
            diagonal = self.weight[n - 1] if self.spatial == "toeplitz" else self.weight.diagonal()
            diagonal.add_(1.0)
        self.bias.fill_(1.0 if self.variant.startswith("multiplicative") else 0.0)

    def central_part(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """`weight` and `bias` for the first m <= n positions: m offsets to each side, or the leading m x m part."""
        n, m = self.sequence_length, num_positions
        return self.weight[n - m : n + m - 1] if self.spatial == "toeplitz" else self.weight[:m, :m], self.bias[:m]

    def spatial_weights(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """weight_NN and bias_N: W and b for the first m <= n positions. Where only inference runs, W is built once."""
        weight, bias_N = self.central_part(num_positions)
        if self.spatial == "dense":
            return weight, bias_N
        has_no_origin = torch.compiler.is_compiling() or self.weight.is_inference()  # no address, or no version
        if self.training or torch.is_grad_enabled() or has_no_origin:
            return toeplitz(weight), bias_N
        made_from = (weight.data_ptr(), num_positions, self.weight._version)
        if self.built is None or self.built[0] != made_from:
            # With the weight, so that no other can come to lie at its address meanwhile.
            self.built = made_from, weight.detach(), toeplitz(weight)
        return self.built[2], bias_N

    def train(self, mode: bool = True) -> "SpatialGatingUnit":
        """Forgets W too, since engines fill gathered weights without a trace."""
        self.built = None
        return super().train(mode)

    def forward(self, z_BNF: Tensor, context_BNK: Tensor | None = None, out: nn.Linear | None = None) -> Tensor:
        """z before GELU -> gated_BNG. The tiny attention's context, projected by `out`, is added to the gate."""
        if self._is_fused(z_BNF):
            weight, bias_N = self.central_part(z_BNF.shape[1])
            gated_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit(
                z_BNF, self.norm.weight, self.norm.bias, weight, bias_N,
                context_BNK, None if out is None else out.weight, None if out is None else out.bias,
                self.norm.eps, torch.is_grad_enabled(),
            )  # fmt: skip
            return gated_BNG
        z_BNF = F.gelu(z_BNF)
        u_BNG, v_BNG = z_BNF.chunk(2, dim=-1) if self.variant == "multiplicative_split" else (z_BNF, z_BNF)
        weight_NN, bias_N = self.spatial_weights(z_BNF.shape[1])
        attended_BNG = None if out is None else out(context_BNK)
        return spatial_gating(u_BNG, self.norm(v_BNG), weight_NN, bias_N, attended_BNG, self.variant)

    def _is_fused(self, z_BNF: Tensor) -> bool:
        if self.kernels == "auto":
            return self.variant == "multiplicative_split" and z_BNF.dtype == torch.bfloat16 and z_BNF.is_cuda
        return self.kernels == "triton"


def spatial_gating(
    u_BNG: Tensor, v_BNG: Tensor, weight_NN: Tensor, bias_N: Tensor, attended_BNG: Tensor | None, variant: Gating
) -> Tensor:
    """Combines u with the gate W v + b (+ attention), v already normalised.

    The product is a batched one whose left operand has batch stride 0: a Linear over positions, matmul or einsum would
    copy v transposed, forward and backward.
    """
    batch_size, num_positions, _ = v_BNG.shape
    gate_BNG = torch.bmm(weight_NN.expand(batch_size, num_positions, num_positions), v_BNG) + bias_N[:, None]
    if attended_BNG is not None:
        gate_BNG = gate_BNG + attended_BNG
    match variant:
        case "linear":
            return gate_BNG
        case "additive":
            return u_BNG + gate_BNG
        case "multiplicative" | "multiplicative_split":
            return u_BNG * gate_BNG


class TinyAttention(nn.Module):
    """One head over all positions, no mask and no positions (Figure 6): y_BND -> context_BNK.

    The gate takes the context together with `out`, the projection to its channels, and adds both in one product.
    """

    def __init__(self, d_model: int, d_attn: int, d_out: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_attn)
        self.out = nn.Linear(d_attn, d_out)

    def forward(self, y_BND: Tensor) -> Tensor:
        q_B1NK, k_B1NK, v_B1NK = self.qkv(y_BND).unsqueeze(1).chunk(3, dim=-1)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q_B1NK, k_B1NK, v_B1NK, dropout_p=dropout).squeeze(1)
