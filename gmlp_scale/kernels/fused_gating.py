"""Where a block's Spatial Gating Unit is computed by the fused kernels, and which weights they take.

Exports carry this file along without the kernels, so it imports nothing of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fused_gating(
    expand: nn.Module,
    y_BND: Tensor,
    is_token_BN: Tensor | None,
    gating: nn.Module,
    attention: nn.Module | None,
    kernels: str,
) -> Tensor | None:
    """The output_BNG of a block's gating and tiny attention, or None where plain PyTorch is to compute it.

    Args:
        expand: what makes the expanded activations before GELU from y.
        y_BND: the block's normalised input, which the attention reads too.
        is_token_BN: where no position reads another that is no token; None if all are tokens.
        gating: a SpatialGatingUnit that multiplies two halves.
        kernels: "torch" gives None, "triton" is always fused, "auto" is fused in bfloat16 on a CUDA device.

    Raises:
        InputError: kernels is "triton" and they cannot run on this device or in this dtype.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else y_BND.dtype
    is_their_case = y_BND.is_cuda and dtype == torch.bfloat16
    if kernels == "torch" or (kernels == "auto" and not is_their_case):
        return None
    if type(expand) is nn.Linear:  # and no adapter: the kernels sum its bias's gradient on their way
        expand_bias_F = expand.bias
        expanded_BNF = F.linear(y_BND, expand.weight, expand_bias_F.detach())
    else:
        expand_bias_F, expanded_BNF = None, expand(y_BND)
    weight, bias_N = gating.central_part(y_BND.shape[1])
    context_BNK = out_weight_GK = out_bias_G = None
    if attention is not None:
        context_BNK = attention.context(y_BND, is_token_BN)
        out_weight_GK, out_bias_G = attention.out.weight, attention.out.bias
    output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(
        expanded_BNF, gating.norm.weight, gating.norm.bias, weight, bias_N,
        context_BNK, out_weight_GK, out_bias_G, expand_bias_F, is_token_BN, gating.norm.eps, torch.is_grad_enabled(),
    )  # fmt: skip
    return output_BNG
