"""The Spatial Gating Unit of gMLP and aMLP (equation 4, Figures 1 and 6) as one operator of PyTorch.

    u, v = split(z)
    S = W LayerNorm(gelu(v)) + b [+ C W_o^T + b_o]     # C the tiny attention's context; LayerNorm(...) is 0 at <pad>
    gelu(u) * S

torch.compile sees one opaque operator; FSDP and ZeRO see plain tensors. Shape suffixes: those of models/gmlp.py, and
T all tokens B * N.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gmlp_scale.errors import InputError

_LIBRARY = torch.library.Library("gmlp_scale", "DEF")


def _operator(function: Callable) -> Callable:
    """Makes a function the operator torch.ops.gmlp_scale.<its name>, and returns that.

    torch.library.custom_op does the same, and takes twice as long in every call. torch.library.triton_op would show the
    kernels to Inductor, but then a compiled block could not be tested in Triton's interpreter.
    """
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.gmlp_scale, name).default


@_operator
def spatial_gating_unit(
    z_BNF: Tensor,
    gain_G: Tensor,
    norm_bias_G: Tensor,
    weight: Tensor,
    bias_N: Tensor,
    context_BNK: Tensor | None,
    out_weight_GK: Tensor | None,
    out_bias_G: Tensor | None,
    expand_bias_F: Tensor | None,
    is_token_BN: Tensor | None,
    eps: float,
    keeps_gate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns output_BNG, and what the backward pass needs: S_BNG, normalised v_BNG, mean_BN and rstd_BN.

    Args:
        z_BNF: the expanded activations before GELU, in bfloat16 or float32, which is the dtype of the products too.
        gain_G, norm_bias_G, eps: the LayerNorm's. These and all other tensors may have another dtype than z.
        weight: the 2N - 1 offsets of a Toeplitz W, or W itself.
        context_BNK, out_weight_GK, out_bias_G: the tiny attention's; all three or none.
        expand_bias_F: what z holds already, detached. Its gradient, z's summed, costs the kernels nothing; autograd
            would read z's gradient again. None if autograd is to do so.
        is_token_BN: bool; W reads 0 where it is False. None if it is True everywhere.
        keeps_gate: False if no backward pass follows; S is then empty.

    Raises:
        InputError: the tensors are neither on a CUDA device nor in Triton's interpreter, or z has another dtype.
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
        context_BNK, out_weight_GK = (tensor.to(z_BNF.dtype).contiguous() for tensor in (context_BNK, out_weight_GK))
    if _is_rounded_late(z_BNF):
        tensors = (z_BNF, gain_G, norm_bias_G, weight, bias_N, context_BNK, out_weight_GK, out_bias_G)
        tensors = (_in_dtype(tensor, torch.float32) for tensor in tensors)
        outputs = spatial_gating_unit(*tensors, None, is_token_BN, eps, keeps_gate)
        return tuple(output.to(z_BNF.dtype) for output in outputs[:3]) + outputs[3:]
    z_BNF = z_BNF.contiguous()
    v_BNG, mean_BN, rstd_BN = layer_norm_of_gelu(z_BNF, gain_G, norm_bias_G, eps)
    if is_token_BN is not None:
        v_BNG *= is_token_BN[:, :, None]
    weight_NN = spatial_matrix(weight, z_BNF.dtype)
    output_BNG, gate_BNG = apply_gate(
        z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G, keeps_gate
    )
    return output_BNG, gate_BNG, v_BNG, mean_BN, rstd_BN


@_operator
def spatial_gating_unit_backward(
    grad_output_BNG: Tensor,
    z_BNF: Tensor,
    gain_G: Tensor,
    weight: Tensor,
    gate_BNG: Tensor,
    v_BNG: Tensor,
    mean_BN: Tensor,
    rstd_BN: Tensor,
    is_token_BN: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of z and S in z's dtype, and in float32 [4, G] (those of expand_bias in two halves, of the
    LayerNorm's gain and bias), that of weight and that of b."""
    from gmlp_scale.kernels.gate import apply_gate_backward
    from gmlp_scale.kernels.layer_norm import layer_norm_of_gelu_backward, new_partial_sums
    from gmlp_scale.kernels.spatial_weight import spatial_matrix, spatial_weight_gradient

    if _is_rounded_late(z_BNF):
        tensors = (grad_output_BNG, z_BNF, gain_G, weight, gate_BNG, v_BNG, mean_BN, rstd_BN)
        grads = spatial_gating_unit_backward(*(_in_dtype(tensor, torch.float32) for tensor in tensors), is_token_BN)
        return tuple(grad.to(z_BNF.dtype) for grad in grads[:2]) + grads[2:]
    z_BNF = z_BNF.contiguous()
    grad_z_BNF = torch.empty_like(z_BNF)
    grads_P4G = new_partial_sums(z_BNF)
    grad_gate_BNG, grad_bias_BN = apply_gate_backward(
        grad_output_BNG.contiguous(), z_BNF, gate_BNG, grad_z_BNF, grads_P4G
    )
    weight_NN = spatial_matrix(weight, z_BNF.dtype)
    grad_v_BNG = torch.bmm(weight_NN.T.expand(len(z_BNF), *weight_NN.shape), grad_gate_BNG)
    if is_token_BN is not None:
        grad_v_BNG *= is_token_BN[:, :, None]
    layer_norm_of_gelu_backward(grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF, grads_P4G)
    grad_weight = spatial_weight_gradient(grad_gate_BNG, v_BNG, like=weight)
    return grad_z_BNF, grad_gate_BNG, grads_P4G.sum(0), grad_weight, grad_bias_BN.sum(0)


@torch.library.register_fake("gmlp_scale::spatial_gating_unit", lib=_LIBRARY)
def _(
    z_BNF, gain_G, norm_bias_G, weight, bias_N, context_BNK, out_weight_GK, out_bias_G, expand_bias_F, is_token_BN, eps,
    keeps_gate,
):  # fmt: skip
    output_BNG = z_BNF.new_empty(*z_BNF.shape[:2], z_BNF.shape[2] // 2)
    mean_BN = z_BNF.new_empty(z_BNF.shape[:2], dtype=torch.float32)
    gate_BNG = torch.empty_like(output_BNG) if keeps_gate else output_BNG.new_empty(0)
    return output_BNG, gate_BNG, torch.empty_like(output_BNG), mean_BN, torch.empty_like(mean_BN)


@torch.library.register_fake("gmlp_scale::spatial_gating_unit_backward", lib=_LIBRARY)
def _(grad_output_BNG, z_BNF, gain_G, weight, gate_BNG, v_BNG, mean_BN, rstd_BN, is_token_BN):
    return (
        z_BNF.new_empty(z_BNF.shape),
        torch.empty_like(gate_BNG),
        mean_BN.new_empty(4, len(gain_G)),
        mean_BN.new_empty(weight.shape),
        mean_BN.new_empty(mean_BN.shape[1]),
    )


class _Differentiable(torch.autograd.Function):
    """spatial_gating_unit and its gradients; only the output has some."""

    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = spatial_gating_unit(*inputs)
        z_BNF, gain_G, _, weight, _, context_BNK, out_weight_GK, _, _, is_token_BN, *_ = inputs
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:9]]
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z_BNF, gain_G, weight, *outputs[1:], is_token_BN, context_BNK, out_weight_GK)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output_BNG, *_):
        *saved, context_BNK, out_weight_GK = ctx.saved_tensors
        grad_z_BNF, grad_gate_BNG, grads_4G, *others = spatial_gating_unit_backward(grad_output_BNG, *saved)
        d_gate = grads_4G.shape[1]
        grad_expand_bias_F, *grads_norm = grads_4G.flatten().split((2 * d_gate, d_gate, d_gate))
        grads = [grad_z_BNF, *grads_norm, *others, None, None, None, grad_expand_bias_F]
        if context_BNK is not None:
            grad_gate_TG, dtype = grad_gate_BNG.flatten(0, 1), grad_gate_BNG.dtype
            grads[5] = grad_gate_BNG @ out_weight_GK.to(dtype)
            grads[6] = grad_gate_TG.T @ context_BNK.flatten(0, 1).to(dtype)
            grads[7] = grad_gate_TG.sum(0, dtype=torch.float32)
        return *(_in_dtype(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None


_LIBRARY.impl("spatial_gating_unit", _Differentiable.apply, "Autograd")


def _check_can_run(z_BNF: Tensor) -> None:
    if z_BNF.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(f"model.kernels=triton computes in bfloat16 and float32, not {z_BNF.dtype}: set it to torch")
    if not z_BNF.is_cuda and not is_interpreted():
        raise InputError(
            f"model.kernels=triton needs a CUDA device, but the model is on {z_BNF.device}: set model.kernels to auto "
            "or torch (or TRITON_INTERPRET=1 in the environment, which runs the kernels step by step, for tests)"
        )


def is_interpreted() -> bool:
    """Whether kernels run step by step on the CPU (TRITON_INTERPRET=1 in the environment)."""
    import triton

    return triton.knobs.runtime.interpret


def _is_rounded_late(z_BNF: Tensor) -> bool:
    """Whether to compute in float32 and round at the end: the interpreter has no products in bfloat16, and it cuts off
    where a GPU rounds to bfloat16."""
    return z_BNF.dtype == torch.bfloat16 and is_interpreted()


def _in_dtype(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None or dtype is None else tensor.to(dtype)
