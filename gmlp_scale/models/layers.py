"""What block families share: their configs' base, LayerNorm, Toeplitz matrices, recomputation, what exporting changes.

Shape suffixes: B batch, H heads, N positions, D width, K head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gmlp_scale.fields import Count, FreeOnResume

NumBlocks = Annotated[Count, Field(le=10_000)]
"""The paper's deepest model has 144. Without a limit a slip of the pen would keep even a dry run busy for ever."""
Width = Annotated[Count, Field(le=2**20)]
VocabSize = Annotated[Count, Field(le=2**40)]
"""PyTorch counts a tensor's bytes in 63 bits, also of one that is never made."""
Recompute = Literal["none", "selective", "full"]
"""none: nothing. selective: everything but its matrix products, so LayerNorms, GELU and gates. A fused Spatial Gating
Unit is computed again too, because it would have to keep more than its input. full: everything, from the block's input.
"""

_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


class FamilyConfig(BaseModel, frozen=True, extra="forbid"):
    """A family also has its sizes, and `multiply_adds_per_block` for one forward pass of one sequence."""

    display_name: ClassVar[str]
    """Its name in a model card."""
    has_absolute_positions: ClassVar[bool] = False
    """Whether position embeddings are added to the tokens'."""
    can_be_causal: ClassVar[bool] = False
    """Whether its blocks take `causal`."""
    has_spatial_filters: ClassVar[bool] = False
    """Whether its blocks have a spatial weight W in `gating`."""
    blocks_differ: ClassVar[bool] = False
    """Whether its blocks take their `index`."""

    kind: str
    masks_padding: FreeOnResume[bool] = False
    """true: no position reads <pad>, so a text has the same logits with any padding and with none. false, as in all
    models made before this field: <pad> is read like a token, so rows must be as long as in training. A run on packed
    rows computes the same with either."""
    num_blocks: NumBlocks
    """Layers. A Transformer's has attention and feed-forward: 12 for what the paper writes as 12+12. [blocks]"""
    d_model: Width
    """Width of the residual stream. [channels]"""
    sequence_length: Width
    """The longest input, n. What has a weight for each position or offset is made for it; shorter inputs take a part.
    [tokens]"""
    vocab_size: VocabSize
    """Rows of the embedding, as many as the tokenizer has pieces or the text has characters. [pieces]"""

    def new_norm(self) -> nn.Module:
        """What normalises after the last block."""
        return LayerNorm(self.d_model)


class LayerNorm(nn.LayerNorm):
    """torch's, computed in the dtype of its parameters, with the result in x's dtype.

    Engines leave the parameters in float32 beside bfloat16 activations, which torch's kernel for CUDA refuses. Its
    kernel for CPUs adds up their gradients in bfloat16: over 4,096 tokens they are 4 % off, over 65,536 tokens 20 %.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's, computed like LayerNorm in the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class BlockGroup(nn.ModuleList):
    """Blocks that run one after the other as one module, so that what an engine does around a module it does once."""

    def forward(self, x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        for block in self:
            x_BND = block(x_BND, is_token_BN)
        return x_BND


def is_exporting() -> bool:
    """True while torch.export or torch.onnx.export traces the model. Training, compiled or not, never sees True.

    While torch.compile traces, some versions of torch say that they export.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def leading(tensor: Tensor, num_positions: int, dim: int) -> Tensor:
    """The first positions along a dimension."""
    if is_exporting():  # a slice is contiguous at the full length only, and the program would be for one case
        return tensor.index_select(dim, torch.arange(num_positions, device=tensor.device))
    return tensor.narrow(dim, 0, num_positions)


def spatial_part(weight: Tensor, num_positions: int) -> Tensor:
    """Of a W that is made for n positions, what the first m of them need: of 2n - 1 offsets the m to each side, of an
    n x n matrix its leading part."""
    if weight.ndim == 1:
        n = (len(weight) + 1) // 2
        return weight[n - num_positions : n + num_positions - 1]
    return leading(leading(weight, num_positions, 0), num_positions, 1)


def flatten_heads(attended_BHNK: Tensor) -> Tensor:
    """[B, N, H K]. The attention of an ONNX program has a memory layout of its own, which may allow no view."""
    attended_BNHK = attended_BHNK.transpose(1, 2)
    if is_exporting():
        attended_BNHK = attended_BNHK.clone(memory_format=torch.contiguous_format)
    return attended_BNHK.flatten(2)


def recomputing(forward: Callable[..., Tensor], recompute: Recompute, has_dropout: bool) -> Callable[..., Tensor]:
    """A block's `forward`, recomputed. Without dropout it draws no random numbers, so their state is not kept."""
    options = {"use_reentrant": False, "preserve_rng_state": has_dropout}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)

    # torch.compile skips functions in torch.utils.checkpoint's own file, so this one is here.
    def recomputing_forward(x_BND: Tensor, is_token_BN: Tensor | None = None) -> Tensor:
        return checkpoint(forward, x_BND, is_token_BN, **options)

    return recomputing_forward


class RowOffsets(nn.Linear):
    """v_BNG -> what each position says of the offsets of its row's Toeplitz matrix, [B, N, 2]: at first all 0.

    Position k says e[k] and l[k], and W[i, j] = (e[i - j] if j <= i, else l[j - i]) / G. Hydra's data-dependent
    Toeplitz matrix takes its forward and its reverse filter so (Hwang et al. 2024, arXiv 2407.09941). There a short
    convolution and SiLU come first, each head has its matrix, the identity is added, and the factor is 0.5 / sqrt(n);
    the authors' file shifts the matrix by one, so its diagonal is e[1]. With 1 / G an optimizer's step moves an offset
    as far as one of a static W, and the length that the model was made for changes nothing.
    """

    def __init__(self, d_gate: int):
        super().__init__(d_gate, 2)

    @staticmethod
    def arranged(said_BN2: Tensor) -> Tensor:
        """[B, 2N - 1], as toeplitz takes them. Not a part of forward, because LoRA replaces the module."""
        earlier_BN, later_BN = said_BN2.unbind(-1)
        both = torch.cat([earlier_BN.flip(-1), later_BN], dim=-1)  # e[0], then l[0], which is no offset's
        places = torch.arange(both.shape[1] - 1, device=both.device)
        return both[:, places + (places >= later_BN.shape[1])]  # a slice of N - 1 would export no program for one token

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.zero_()
        self.bias.zero_()

    def init_special_weights(self, generator: torch.Generator) -> None:
        self.reset_parameters()


def toeplitz(offsets: Tensor) -> Tensor:
    """The matrix W[..., i, j] = offsets[..., (n - 1) + (j - i)], for any leading dimensions.

    offsets: [..., 2n - 1]. Number n - 1 is on the diagonal, the later numbers are to its right (later positions), the
    earlier ones to its left. Returns [..., n, n] in the dtype of `offsets`. The gradient of an offset is the sum over
    its diagonal, in float32 (float64 for float64) and in one fixed order, so it repeats bit for bit.
    """
    return _indexed(offsets) if is_exporting() else _Toeplitz.apply(offsets)


class _Toeplitz(torch.autograd.Function):
    """W[i] is the n offsets from number n - 1 - i on. The backward pass of plain indexing adds atomically on a GPU."""

    @staticmethod
    def forward(ctx, offsets: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a window's size would be a constant, with a graph for each length
            return _indexed(offsets)
        n = (offsets.shape[-1] + 1) // 2
        return offsets.unfold(-1, n, 1).flip(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return diagonal_sums(grad).to(grad.dtype)


def _indexed(offsets: Tensor) -> Tensor:
    n = (offsets.shape[-1] + 1) // 2
    positions = torch.arange(n, device=offsets.device)
    return offsets[..., n - 1 + positions - positions[:, None]]


def diagonal_sums(matrix: Tensor) -> Tensor:
    """The sum over each diagonal of [..., n, n], in the order of the offsets: [..., 2n - 1], in float32 or float64.

    Zeros are put on both sides of every line of the matrix, and each line is read from one element further on than the
    line above. The diagonals are then columns.
    """
    n = matrix.shape[-1]
    padded = F.pad(matrix, (n - 1, n)).contiguous()
    shifted = padded.as_strided((*matrix.shape[:-1], 2 * n - 1), (*padded.stride()[:-2], 3 * n, 1))
    return shifted.sum(-2, dtype=torch.promote_types(matrix.dtype, torch.float32))
