"""The MLP-Mixer layer against plain loops."""

import numpy as np
import pytest
import torch

from tests.models.every_kind import perturb, tiny_model
from tests.models.float64_layers import gelu, layer_norm, linear, numbers


def block_by_loops(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    m = len(x)
    y = layer_norm(x, p["spatial_norm.weight"], p["spatial_norm.bias"])
    hidden = gelu(linear(y.T, p["spatial_expand.weight"][:, :m], p["spatial_expand.bias"]))
    x = x + linear(hidden, p["spatial_project.weight"][:m], p["spatial_project.bias"][:m]).T
    hidden = gelu(linear(layer_norm(x, p["norm.weight"], p["norm.bias"]), p["expand.weight"], p["expand.bias"]))
    return x + linear(hidden, p["project.weight"], p["project.bias"])


@pytest.mark.parametrize("num_positions", [12, 5])
def test_layer_is_that_of_the_equations(num_positions):
    block = perturb(tiny_model("mixer").blocks[0].double())
    x_BND = torch.randn(2, num_positions, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = [block_by_loops(numbers(block), row) for row in x_BND.numpy()]
    np.testing.assert_allclose(block(x_BND).detach().numpy(), expected, rtol=1e-12, atol=1e-12)
