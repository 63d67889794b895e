"""The Spatial Gating Unit of gMLP and aMLP (equation 4, Figures 1 and 6) as one operator of PyTorch.

    u, v = split(z)
    S = W LayerNorm(gelu(v)) + b [+ C W_o^T + b_o]     # C the tiny attention's context
    gelu(u) * S

torch.compile sees one opaque operator; FSDP and ZeRO see plain tensors. Shape suffixes: those of models/gmlp.py, and
T all tokens B * N.
"""

import torch
from torch import Tensor


class KernelsError(ValueError):
    """The kernels cannot run on the model's device, or not in its dtype."""


@torch.library.custom_op("gmlp_scale::spatial_gating_unit", mutates_args=())
def spatial_gating_unit(
    z_BNF: Tensor,
    gain_G: Tensor,
    norm_bias_G: Tensor,
    weight: Tensor,
    bias_N: Tensor,
    context_BNK: Tensor | None,
    out_weight_GK: Tensor | None,
    out_bias_G: Tensor | None,
    eps: float,
    keeps_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns output_BNG, and what the backward pass needs: S_BNG, normalised v_BNG, mean_BN and rstd_BN.

    Args:
        z_BNF: the expanded activations before GELU. They and all other tensors are bfloat16, or all are float32.
        gain_G, norm_bias_G, eps: the LayerNorm's.
        weight: the 2N - 1 offsets of a Toeplitz W, or W itself.
        context_BNK, out_weight_GK, out_bias_G: the tiny attention's; all three or none.
        keeps_gate: False if no backward pass follows; S is then empty.

    Raises:
        KernelsError: the tensors are neither on a CUDA device nor in Triton's interpreter, or have another dtype.
    """
    from gmlp_scale.kernels.gate import apply_gate
    from gmlp_scale.kernels.layer_norm import layer_norm_of_gelu
    from gmlp_scale.kernels.spatial_weight import spatial_matrix

    _check_can_run(z_BNF)
    # A kernel would read past the end of a tensor of a wrong shape, such as one that an engine has not gathered.
    batch_size, num_positions, d_gate = z_BNF.shape[0], z_BNF.shape[1], z_BNF.shape[2] // 2
    assert gain_G.shape == norm_bias_G.shape == (d_gate,) and bias_N.shape == (num_positions,)
    assert weight.shape in ((2 * num_positions - 1,), (num_positions, num_positions))
    if context_BNK is not None:
        d_attn = context_BNK.shape[-1]
        assert context_BNK.shape == (batch_size, num_positions, d_attn)
        assert out_weight_GK.shape == (d_gate, d_attn) and out_bias_G.shape == (d_gate,)
    if _is_rounded_late(z_BNF):
        tensors = (z_BNF, gain_G, norm_bias_G, weight, bias_N, context_BNK, out_weight_GK, out_bias_G)
        outputs = spatial_gating_unit(*map(_in_float32, tensors), eps, keeps_gate)
        return tuple(output.to(z_BNF.dtype) for output in outputs[:3]) + outputs[3:]
    z_BNF, weight = z_BNF.contiguous(), weight.contiguous()
    context_BNK = None if context_BNK is None else context_BNK.contiguous()
    v_BNG, mean_BN, rstd_BN = layer_norm_of_gelu(z_BNF, gain_G, norm_bias_G, eps)
    output_BNG, gate_BNG = apply_gate(
        z_BNF, v_BNG, spatial_matrix(weight), bias_N, context_BNK, out_weight_GK, out_bias_G, keeps_gate
    )
    return output_BNG, gate_BNG, v_BNG, mean_BN, rstd_BN


@torch.library.custom_op("gmlp_scale::spatial_gating_unit_backward", mutates_args=())
def spatial_gating_unit_backward(
    grad_output_BNG: Tensor,
    z_BNF: Tensor,
    gain_G: Tensor,
    weight: Tensor,
    gate_BNG: Tensor,
    v_BNG: Tensor,
    mean_BN: Tensor,
    rstd_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of z, S, gain, the LayerNorm's bias, weight and b, all in z's dtype."""
    from gmlp_scale.kernels.gate import apply_gate_backward
    from gmlp_scale.kernels.layer_norm import layer_norm_of_gelu_backward
    from gmlp_scale.kernels.spatial_weight import spatial_matrix, spatial_weight_gradient

    if _is_rounded_late(z_BNF):
        tensors = (grad_output_BNG, z_BNF, gain_G, weight, gate_BNG, v_BNG, mean_BN, rstd_BN)
        return tuple(grad.to(z_BNF.dtype) for grad in spatial_gating_unit_backward(*map(_in_float32, tensors)))
    z_BNF, weight = z_BNF.contiguous(), weight.contiguous()
    batch_size, num_positions, _ = z_BNF.shape
    grad_z_BNF = torch.empty_like(z_BNF)
    grad_gate_BNG, grad_bias_BN = apply_gate_backward(grad_output_BNG.contiguous(), z_BNF, gate_BNG, grad_z_BNF)
    transposed_BNN = spatial_matrix(weight).T.expand(batch_size, num_positions, num_positions)
    grad_v_BNG = torch.bmm(transposed_BNN, grad_gate_BNG)
    grad_gain_G, grad_norm_bias_G = layer_norm_of_gelu_backward(grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF)
    grad_weight = spatial_weight_gradient(grad_gate_BNG, v_BNG, like=weight)
    of_parameters = (grad_gain_G, grad_norm_bias_G, grad_weight, grad_bias_BN.sum(0))
    return grad_z_BNF, grad_gate_BNG, *(grad.to(z_BNF.dtype, copy=True) for grad in of_parameters)


@spatial_gating_unit.register_fake
def _(z_BNF, gain_G, norm_bias_G, weight, bias_N, context_BNK, out_weight_GK, out_bias_G, eps, keeps_gate):
    output_BNG = z_BNF.new_empty(*z_BNF.shape[:2], z_BNF.shape[2] // 2)
    mean_BN = z_BNF.new_empty(z_BNF.shape[:2], dtype=torch.float32)
    gate_BNG = torch.empty_like(output_BNG) if keeps_gate else output_BNG.new_empty(0)
    return output_BNG, gate_BNG, torch.empty_like(output_BNG), mean_BN, torch.empty_like(mean_BN)


@spatial_gating_unit_backward.register_fake
def _(grad_output_BNG, z_BNF, gain_G, weight, gate_BNG, v_BNG, mean_BN, rstd_BN):
    return (
        z_BNF.new_empty(z_BNF.shape),
        torch.empty_like(gate_BNG),
        torch.empty_like(gain_G),
        torch.empty_like(gain_G),
        weight.new_empty(weight.shape),
        weight.new_empty(z_BNF.shape[1]),
    )


def _save(ctx, inputs, output) -> None:
    z_BNF, gain_G, _, weight, _, context_BNK, out_weight_GK, *_ = inputs
    _, *kept = output
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(z_BNF, gain_G, weight, *kept, context_BNK, out_weight_GK)


def _backward(ctx, grad_output_BNG, *_):
    *saved, context_BNK, out_weight_GK = ctx.saved_tensors
    z_BNF, gain_G, weight, *kept = saved
    grad_z_BNF, grad_gate_BNG, *of_parameters = spatial_gating_unit_backward(
        grad_output_BNG, z_BNF, gain_G, weight, *kept
    )
    of_attention = (None, None, None)
    if context_BNK is not None:
        grad_gate_TG = grad_gate_BNG.flatten(0, 1)
        of_attention = (
            grad_gate_BNG @ out_weight_GK,
            grad_gate_TG.T @ context_BNK.flatten(0, 1),
            grad_gate_TG.sum(0),
        )
    return grad_z_BNF, *of_parameters, *of_attention, None, None


spatial_gating_unit.register_autograd(_backward, setup_context=_save)


def _check_can_run(z_BNF: Tensor) -> None:
    if z_BNF.dtype not in (torch.bfloat16, torch.float32):
        raise KernelsError(f"model.kernels=triton computes in bfloat16 and float32, not {z_BNF.dtype}: set it to torch")
    if not z_BNF.is_cuda and not is_interpreted():
        raise KernelsError(
            f"model.kernels=triton needs a CUDA device, but the model is on {z_BNF.device}: set model.kernels to auto "
            "or torch (or TRITON_INTERPRET=1 in the environment, which runs the kernels step by step, for tests)"
        )


def is_interpreted() -> bool:
    """Whether kernels run step by step on the CPU (TRITON_INTERPRET=1 in the environment)."""
    import triton

    return triton.knobs.runtime.interpret


def _is_rounded_late(z_BNF: Tensor) -> bool:
    """Whether to compute in float32 and round at the end: the interpreter has no products in bfloat16, and where a GPU
    rounds to bfloat16, it cuts off."""
    return z_BNF.dtype == torch.bfloat16 and is_interpreted()


def _in_float32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()
