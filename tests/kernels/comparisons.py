"""The fused Spatial Gating Unit beside a plain one in float64, on any device; run by child processes too."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gmlp_scale.kernels.spatial_gating_unit import spatial_gating_unit
from gmlp_scale.models.layers import toeplitz

INPUTS = ("z", "gain", "norm_bias", "weight", "bias", "context", "out_weight", "out_bias", "expand_bias")
VECTORS = ("gain", "norm_bias", "weight", "bias", "out_bias")
"""What engines keep in float32, if W is Toeplitz."""
PARAMETERS = (*VECTORS, "out_weight")
"""What is in float32 under autocast."""
EPS = 1e-5


class Case(NamedTuple):
    n: int
    spatial: str = "toeplitz"
    d_attn: int | None = None
    dtype: torch.dtype = torch.float32
    batch_size: int = 2
    d_gate: int = 40
    in_float32: tuple[str, ...] = ()
    """The inputs that are in float32, whatever `dtype` says of the others."""
    padded: bool = False
    """Whether the second half of every other row is padding."""


def inputs_of(case: Case, device: str = "cpu") -> tuple[list[Tensor | None], Tensor]:
    """Every input of the unit in the order of INPUTS, and a gradient of its output."""
    generator = torch.Generator().manual_seed(case.n)
    random = partial(torch.randn, generator=generator)
    n, g, k = case.n, case.d_gate, case.d_attn
    weight = random(n, n) if case.spatial == "dense" else random(2 * n - 1)
    attention = [None] * 3 if k is None else [random(case.batch_size, n, k), random(g, k) / k**0.5, random(g)]
    inputs = [
        random(case.batch_size, n, 2 * g), 1 + random(g) / 3, random(g), weight / n**0.5, 1 + random(n), *attention,
        random(2 * g),
    ]  # fmt: skip
    dtypes = (torch.float32 if name in case.in_float32 else case.dtype for name in INPUTS)
    inputs = [
        None if tensor is None else tensor.to(device, dtype) for tensor, dtype in zip(inputs, dtypes, strict=True)
    ]
    return inputs, random(case.batch_size, n, g).to(device, case.dtype)


def tokens_of(case: Case, device: str = "cpu") -> Tensor | None:
    """is_token_BN."""
    if not case.padded:
        return None
    is_token_BN = torch.ones(case.batch_size, case.n, dtype=torch.bool, device=device)
    is_token_BN[::2, case.n // 2 :] = False
    return is_token_BN


def plain_unit(
    z, gain, norm_bias, weight, bias, context, out_weight, out_bias, expand_bias, is_token_BN=None
) -> Tensor:
    z = z + expand_bias - expand_bias.detach()  # which z holds already
    u, v = F.gelu(z).chunk(2, dim=-1)
    v = F.layer_norm(v, v.shape[-1:], gain, norm_bias, EPS)
    if is_token_BN is not None:
        v = v.masked_fill(~is_token_BN[:, :, None], 0)
    gate = (toeplitz(weight) if weight.ndim == 1 else weight) @ v + bias[:, None]
    if context is not None:
        gate = gate + context @ out_weight.T + out_bias
    return u * gate


def fused_unit(*inputs: Tensor | None, is_token_BN: Tensor | None = None) -> Tensor:
    return spatial_gating_unit(*inputs, is_token_BN, EPS, True)[0]


def output_and_gradients(unit: Callable, inputs: list[Tensor | None], grad_output: Tensor) -> dict[str, Tensor]:
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = unit(*leaves)
    output.backward(grad_output)
    gradients = {name: leaf.grad for name, leaf in zip(INPUTS, leaves, strict=True) if leaf is not None}
    return {"output": output.detach()} | gradients


def relative_errors(case: Case, device: str = "cpu") -> dict[str, float]:
    """Of the output and every gradient, by norm. Also holds each to its input's shape and dtype."""
    inputs, grad_output = inputs_of(case, device)
    fused, plain = (partial(unit, is_token_BN=tokens_of(case, device)) for unit in (fused_unit, plain_unit))
    exact_inputs = [None if tensor is None else tensor.double() for tensor in inputs]
    found = output_and_gradients(fused, inputs, grad_output)
    dtypes = {"output": case.dtype} | {
        name: tensor.dtype for name, tensor in zip(INPUTS, inputs, strict=True) if tensor is not None
    }
    expected = output_and_gradients(plain, exact_inputs, grad_output.double())
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, dtypes[name]), name
    return {
        name: ((tensor.double() - expected[name]).norm() / expected[name].norm()).item()
        for name, tensor in found.items()
    }
