"""The Toeplitz matrix and its gradient."""

import pytest
import torch

from gmlp_scale.models.toeplitz import toeplitz


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
