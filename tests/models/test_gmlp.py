"""gMLP and aMLP blocks against the equations of the paper, their start as feed-forward layers, and Toeplitz."""

import copy
import math
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from gmlp_scale.models import AmlpConfig, GmlpConfig, build_model
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.gmlp import Gating, GmlpBlock, Spatial
from gmlp_scale.models.layers import toeplitz
from tests.models.every_kind import check_gradients, perturb
from tests.models.float64_layers import attention, gelu, layer_norm, linear, numbers

GATINGS, SPATIALS = get_args(Gating), get_args(Spatial)
N = 6


def make_block(gating, *, d_attn=None, n=N, d_model=4, d_ffn=6, dtype=torch.float64, **fields) -> GmlpBlock:
    """Initialised as a model initialises it."""
    sizes = {"num_blocks": 1, "d_model": d_model, "d_ffn": d_ffn, "sequence_length": n, "vocab_size": 8}
    if d_attn is None:
        config = GmlpConfig(**sizes, gating=gating, **fields)
    else:
        config = AmlpConfig(**sizes, gating=gating, d_attn=d_attn, **fields)
    return build_model(config, head=Backbone).blocks[0].to(dtype)


def block_by_loops(
    p: dict[str, np.ndarray], x: np.ndarray, gating: str, spatial: str, num_mixed: int | None = None
) -> np.ndarray:
    """Equations 1 to 4 and Figure 6 for one row, W by a double loop. Channels after num_mixed bypass the gating."""
    m, n = len(x), len(p["gating.bias"])
    y = layer_norm(x, p["norm.weight"], p["norm.bias"])
    z = gelu(linear(y, p["expand.weight"], p["expand.bias"]))
    z, past_the_gating = np.split(z, [num_mixed or z.shape[1]], axis=1)
    half = z.shape[1] // 2
    bypass, operand = (z[:, :half], z[:, half:]) if gating.endswith("_split") else (z, z)
    operand = layer_norm(operand, p["gating.norm.weight"], p["gating.norm.bias"])
    weights = np.empty((m, m))
    for i in range(m):
        for j in range(m):
            weights[i, j] = p["gating.weight"][i, j] if spatial == "dense" else p["gating.weight"][(n - 1) + (j - i)]
            if spatial == "dynamic_toeplitz":  # position k says what the offsets k and -k add
                earlier, later = linear(operand, p["gating.offsets.weight"], p["gating.offsets.bias"]).T
                weights[i, j] += (earlier[i - j] if j <= i else later[j - i]) / operand.shape[1]
    gate = np.empty_like(operand)
    for i in range(m):
        for channel in range(operand.shape[1]):
            gate[i, channel] = sum(weights[i, j] * operand[j, channel] for j in range(m)) + p["gating.bias"][i]
    if "attention.qkv.weight" in p:
        q, k, v = np.split(linear(y, p["attention.qkv.weight"], p["attention.qkv.bias"]), 3, axis=1)
        attended = attention(q, k, v, np.zeros((m, m)))
        gate = gate + linear(attended, p["attention.out.weight"], p["attention.out.bias"])
    s = {
        "linear": gate,
        "additive": bypass + gate,
        "multiplicative": bypass * gate,
        "multiplicative_split": bypass * gate,
    }
    projected = np.concatenate([s[gating], past_the_gating], axis=1)
    return x + linear(projected, p["project.weight"], p["project.bias"])


@pytest.mark.parametrize("num_positions", [N, 4])
@pytest.mark.parametrize("d_attn", [None, 3])
@pytest.mark.parametrize("spatial", SPATIALS)
@pytest.mark.parametrize("gating", GATINGS)
def test_block_is_that_of_the_equations(gating, spatial, d_attn, num_positions):
    block = perturb(make_block(gating, spatial=spatial, d_attn=d_attn))
    x_BND = torch.randn(2, num_positions, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = [block_by_loops(numbers(block), row, gating, spatial) for row in x_BND.numpy()]
    np.testing.assert_allclose(block(x_BND).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("d_attn", [None, 3])
@pytest.mark.parametrize("gating", GATINGS)
def test_the_rest_of_the_hidden_layer_bypasses_the_gating(gating, d_attn):
    block = perturb(make_block(gating, d_attn=d_attn, d_ffn=10, mixed_share=0.4))
    x_BND = torch.randn(2, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = [block_by_loops(numbers(block), row, gating, "toeplitz", num_mixed=4) for row in x_BND.numpy()]
    np.testing.assert_allclose(block(x_BND).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixed_share": 1.5}, "mixed_share\n  Input should be less than or equal to 1"),
        ({"mixed_share": 0.01}, r"d_ffn \* mixed_share is 0: make it positive, and even if it is split"),
        ({"mixed_share": 0.5}, r"d_ffn \* mixed_share is 5: make it positive, and even if it is split"),
        ({"mixed_share": 0.4, "kernels": "triton"}, "kernels triton is for .* mixed_share 1, not .* mixed_share 0.4"),
    ],
)
def test_a_share_that_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        make_block("multiplicative_split", d_ffn=10, **fields)


@pytest.mark.parametrize("fields", [{"gating": "linear"}, {"spatial": "dynamic_toeplitz"}, {"mixed_share": 0.5}])
def test_forms_without_kernels_are_computed_by_pytorch(fields):
    """Where the kernels can run, auto must not choose them."""
    form = {"gating": "multiplicative_split", "d_ffn": 8} | fields
    assert make_block(**form).kernels == "torch"
    with pytest.raises(ValidationError, match=r"kernels triton is for .*, not .*: set it to auto"):
        make_block(**form, kernels="triton")
    assert make_block("multiplicative_split").kernels == "auto"


@pytest.mark.parametrize("d_attn", [None, 3])
@pytest.mark.parametrize("spatial", SPATIALS)
@pytest.mark.parametrize("gating", GATINGS)
def test_gradients_are_right(gating, spatial, d_attn):
    block = perturb(make_block(gating, spatial=spatial, d_attn=d_attn, n=3))
    check_gradients(block, d_model=4)


@pytest.mark.parametrize("d_attn", [None, 64])
@pytest.mark.parametrize("spatial", SPATIALS)
@pytest.mark.parametrize("gating", GATINGS)
def test_block_starts_as_a_feed_forward_layer(gating, spatial, d_attn):
    block = make_block(gating, spatial=spatial, d_attn=d_attn, n=128, d_model=128, d_ffn=512, dtype=torch.float32)
    x_BND = torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(3))
    hidden = F.gelu(block.expand(block.norm(x_BND)))
    if gating.endswith("_split"):
        hidden = hidden[..., :256]
    if gating == "linear":
        hidden = F.layer_norm(hidden, (512,))  # f normalises its input, and the block passes on nothing else
    feed_forward = block.project(hidden)
    assert (block(x_BND) - x_BND - feed_forward).norm() <= 0.05 * feed_forward.norm()


@pytest.mark.parametrize("spatial", SPATIALS)
@pytest.mark.parametrize("gating", GATINGS)
def test_spatial_weights_start_near_zero_and_the_bias_at_one(gating, spatial):
    gate = make_block(gating, spatial=spatial, n=64).gating
    z_BNG = torch.randn(1, 64, gate.norm.weight.numel(), dtype=torch.float64)
    weight_NN, bias_N = gate.spatial_weights(64, z_BNG)
    if gating == "linear":
        weight_NN = weight_NN - torch.eye(64)
    assert 0 < weight_NN.std() * math.sqrt(64) <= 0.05
    assert torch.equal(bias_N, torch.full_like(bias_N, 1.0 if gating.startswith("multiplicative") else 0.0))
    assert torch.equal(gate.norm.weight, torch.ones_like(gate.norm.weight))


def test_shorter_rows_use_the_central_offsets():
    gate = perturb(make_block("multiplicative_split").gating)
    weight_NN, bias_N = gate.spatial_weights(4)
    whole_NN, _ = gate.spatial_weights(N)
    assert torch.equal(weight_NN[0], gate.weight[N - 1 : N + 3]) and torch.equal(
        weight_NN[:, 0], gate.weight[N - 4 : N].flip(0)
    )
    assert torch.equal(weight_NN, whole_NN[:4, :4]) and torch.equal(bias_N, gate.bias[:4])


def test_activations_in_bf16_meet_the_float32_values_of_vectors():
    """b is 1.003 here. Above 1 bfloat16 has steps of 0.008, so a b or a gate in it would be off by 0.003."""
    exact = make_block("multiplicative_split", n=64, d_ffn=512).gating
    with torch.no_grad():
        exact.bias += 0.003
    in_float32 = copy.deepcopy(exact).float()
    z_BNF = torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected_BNG, found_BNG = exact(z_BNF.double()), in_float32(z_BNF)
    assert found_BNG.dtype == torch.bfloat16
    u_BNG = z_BNF.double()[..., :256]  # weights by u, so that roundings of the output cancel out
    ratio_N = (found_BNG * u_BNG).sum((0, 2)) / (expected_BNG * u_BNG).sum((0, 2))
    torch.testing.assert_close(ratio_N, torch.ones_like(ratio_N), rtol=0, atol=3e-4)

    expected_BNG.sum().backward()
    found_BNG.sum().backward()
    for (name, vector), expected in zip(in_float32.named_parameters(), exact.parameters(), strict=True):
        assert vector.grad.dtype == torch.float32
        assert (vector.grad - expected.grad).norm() < 0.01 * expected.grad.norm(), name


def test_a_dynamic_w_is_of_the_row_and_starts_as_the_static_one():
    static, dynamic = (make_block("multiplicative_split", spatial=kind) for kind in ("toeplitz", "dynamic_toeplitz"))
    x_BND = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dynamic.load_state_dict(static.state_dict(), strict=False)
    assert torch.equal(dynamic(x_BND), static(x_BND))
    v_BNG = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    first_NN, second_NN = perturb(dynamic.gating).spatial_weights(5, v_BNG)[0]
    assert not torch.isclose(first_NN, second_NN).any()


def test_a_causal_dynamic_w_sees_no_later_position():
    sizes = {"num_blocks": 1, "d_model": 4, "d_ffn": 6, "sequence_length": N, "vocab_size": 8}
    config = GmlpConfig(**sizes, spatial="dynamic_toeplitz")
    block = perturb(build_model(config, head=Backbone, causal=True).blocks[0].double())
    x_BND = torch.randn(1, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    for position in range(N):
        (grad_BND,) = torch.autograd.grad(block(x_BND)[0, position].sum(), x_BND)
        assert not grad_BND[0, position + 1 :].any() and grad_BND[0, : position + 1].all()


def test_a_split_needs_an_even_width():
    with pytest.raises(ValidationError, match=r"d_ffn \* mixed_share is 7: make it positive, and even if it is split"):
        make_block("multiplicative_split", d_ffn=7)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_an_element_is_the_offset_j_minus_i(n):
    offsets = torch.randn(2, 3, 2 * n - 1, dtype=torch.float64)
    expected = torch.empty(2, 3, n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            expected[..., i, j] = offsets[..., (n - 1) + (j - i)]
    assert torch.equal(toeplitz(offsets), expected)


def test_gradient_is_right():
    assert torch.autograd.gradcheck(toeplitz, torch.randn(2, 9, dtype=torch.float64, requires_grad=True))


def test_gradient_accumulates_in_float32():
    # Ones added up in bfloat16 stop at 256.
    n = 512
    offsets = torch.zeros(2 * n - 1, dtype=torch.bfloat16, requires_grad=True)
    toeplitz(offsets).backward(torch.ones(n, n, dtype=torch.bfloat16))
    num_elements = n - (torch.arange(2 * n - 1) - (n - 1)).abs()
    assert torch.equal(offsets.grad, num_elements.to(torch.bfloat16))


def test_gradient_repeats_bit_for_bit():
    offsets = torch.randn(1023, requires_grad=True)
    grad = torch.randn(512, 512)
    (first,) = torch.autograd.grad(toeplitz(offsets), offsets, grad)
    (second,) = torch.autograd.grad(toeplitz(offsets), offsets, grad)
    assert torch.equal(first, second)
