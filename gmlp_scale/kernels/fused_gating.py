"""Where a block's Spatial Gating Unit is computed by the fused kernels, and which weights they take.

Exports carry this file along without the kernels, so it imports nothing of them.
"""

import torch
from torch import Tensor, nn


def fused_gating(
    expanded_BNF: Tensor,
    y_BND: Tensor,
    is_token_BN: Tensor | None,
    gating: nn.Module,
    attention: nn.Module | None,
    kernels: str,
) -> Tensor | None:
    """The output_BNG of a block's gating and tiny attention, or None where plain PyTorch is to compute it.

    Args:
        expanded_BNF: the expanded activations before GELU.
        y_BND: the block's normalised input, which the attention reads.
        is_token_BN: where no position reads another that is no token; None if all are tokens.
        gating: a SpatialGatingUnit that multiplies two halves.
        kernels: "torch" gives None, "triton" is always fused, "auto" is fused in bfloat16 on a CUDA device.

    Raises:
        InputError: kernels is "triton" and they cannot run on this device or in this dtype.
    """
    is_their_case = expanded_BNF.is_cuda and expanded_BNF.dtype == torch.bfloat16
    if kernels == "torch" or gating.offsets is not None or (kernels == "auto" and not is_their_case):
        return None  # the kernels take one W for all rows
    weight, bias_N = gating.central_part(y_BND.shape[1])
    context_BNK = out_weight_GK = out_bias_G = None
    if attention is not None:
        context_BNK = attention.context(y_BND, is_token_BN)
        out_weight_GK, out_bias_G = attention.out.weight, attention.out.bias
    output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(
        expanded_BNF, gating.norm.weight, gating.norm.bias, weight, bias_N,
        context_BNK, out_weight_GK, out_bias_G, is_token_BN, gating.norm.eps, torch.is_grad_enabled(),
    )  # fmt: skip
    return output_BNG
