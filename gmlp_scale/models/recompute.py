"""What a block computes again in the backward pass instead of keeping it.

Shape suffixes: B batch, N positions, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


def recomputing(forward: Callable[..., Tensor], recompute: Recompute, has_dropout: bool) -> Callable[..., Tensor]:
    """A block's `forward`, recomputed. Without dropout it draws no random numbers, so their state is not kept."""
    options = {"use_reentrant": False, "preserve_rng_state": has_dropout}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _PRODUCTS)

    # torch.compile skips functions in torch.utils.checkpoint's own file, so this one is here.
    def recomputing_forward(x_BND: Tensor, *padding_mask: Tensor) -> Tensor:
        return checkpoint(forward, x_BND, *padding_mask, **options)

    return recomputing_forward
