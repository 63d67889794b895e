"""Transformer and Mixer layers and T5's buckets against plain loops."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gmlp_scale.models.transformer import RelativeBias, relative_bucket
from tests.models.every_kind import TRANSFORMERS, check_gradients, perturb, tiny_model
from tests.models.float64_layers import attention, gelu, layer_norm, linear, numbers, softmax


def bucket_by_loop(offset: int) -> int:
    """Mesh TensorFlow's scheme: 0 to 15 for keys at or before the query, 16 to 31 for those after it."""
    side, distance = (16 if offset > 0 else 0), abs(offset)
    if distance < 8:
        return side + distance
    steps = 0  # distance reaches 8 * 2^(steps / 2): 8, 11.3, 16, 22.6, 32 ...
    while steps < 7 and distance**2 >= 64 * 2 ** (steps + 1):
        steps += 1
    return side + 8 + steps


def block_by_loops(p: dict[str, np.ndarray], x: np.ndarray, num_heads: int, has_content: bool) -> np.ndarray:
    n, d = x.shape
    bias = np.zeros((num_heads, n, n))
    if "attention.relative_bias.table.weight" in p:
        for i in range(n):
            for j in range(n):
                bias[:, i, j] = p["attention.relative_bias.table.weight"][bucket_by_loop(j - i)]
    y = layer_norm(x, p["attention_norm.weight"], p["attention_norm.bias"])
    attended = np.zeros_like(x)
    for head in range(num_heads):
        channels = slice(head * d // num_heads, (head + 1) * d // num_heads)
        if has_content:
            q, k, v = np.split(linear(y, p["attention.qkv.weight"], p["attention.qkv.bias"]), 3, axis=1)
            attended[:, channels] = attention(q[:, channels], k[:, channels], v[:, channels], bias[head])
        else:
            v = linear(y, p["attention.value.weight"], p["attention.value.bias"])
            for i in range(n):
                for j, weight in enumerate(softmax(bias[head, i])):
                    attended[i, channels] += weight * v[j, channels]
    x = x + linear(attended, p["attention.out.weight"], p["attention.out.bias"])
    hidden = gelu(linear(layer_norm(x, p["norm.weight"], p["norm.bias"]), p["expand.weight"], p["expand.bias"]))
    return x + linear(hidden, p["project.weight"], p["project.bias"])


def mixer_by_loops(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    m = len(x)
    y = layer_norm(x, p["spatial_norm.weight"], p["spatial_norm.bias"])
    hidden = gelu(linear(y.T, p["spatial_expand.weight"][:, :m], p["spatial_expand.bias"]))
    x = x + linear(hidden, p["spatial_project.weight"][:m], p["spatial_project.bias"][:m]).T
    hidden = gelu(linear(layer_norm(x, p["norm.weight"], p["norm.bias"]), p["expand.weight"], p["expand.bias"]))
    return x + linear(hidden, p["project.weight"], p["project.bias"])


@pytest.mark.parametrize("num_positions", [12, 5])
@pytest.mark.parametrize("kind", [*TRANSFORMERS, "mixer"])
def test_layer_is_that_of_the_equations(kind, num_positions):
    block = perturb(tiny_model(kind).blocks[0].double())
    x_BND = torch.randn(2, num_positions, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if kind == "mixer":
        expected = [mixer_by_loops(numbers(block), row) for row in x_BND.numpy()]
    else:
        expected = [block_by_loops(numbers(block), row, 2, kind != "bert-relative-only") for row in x_BND.numpy()]
    np.testing.assert_allclose(block(x_BND).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_gradients_are_right(kind):
    block = perturb(tiny_model(kind, d_model=4, d_ffn=4).blocks[0].double())
    check_gradients(block, d_model=4)


def test_buckets_are_those_of_t5():
    offsets = range(-600, 601)
    assert relative_bucket(torch.tensor(offsets)).tolist() == [bucket_by_loop(offset) for offset in offsets]


def test_biases_are_per_layer_and_head():
    blocks = tiny_model("bert-relative").blocks
    tables = [block.attention.relative_bias.table.weight for block in blocks]
    assert all(table.shape == (32, 2) for table in tables) and tables[0] is not tables[1]


def test_bias_stands_at_the_query_and_key():
    biases = RelativeBias(num_heads=2)
    bias_HNN = biases(num_positions=9, device=torch.device("cpu"))
    assert torch.equal(bias_HNN[:, 7, 3], biases.table.weight[4]) and torch.equal(
        bias_HNN[:, 3, 7], biases.table.weight[20]
    )


def test_softmax_over_the_biases_alone_is_in_float32():
    block = tiny_model("bert-relative-only", d_model=512, sequence_length=300).blocks[0].attention.bfloat16()
    with torch.no_grad():
        block.value.bias.fill_(1.0)
        block.value.weight.zero_()
        block.out.weight.copy_(torch.eye(512))
    # 300 equal weights, rounded once to bfloat16, add up to one within that rounding.
    assert math.isclose(block(torch.zeros(1, 300, 512, dtype=torch.bfloat16)).mean().item(), 1.0, rel_tol=2**-8)


def test_heads_must_divide_the_width():
    with pytest.raises(ValidationError, match="d_model is 16 and num_heads 3"):
        tiny_model("bert-relative", num_heads=3)
