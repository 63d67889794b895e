"""GELU and its slope in the kernels, against float64: in Triton's interpreter, and on a GPU."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gmlp_scale.kernels.layer_norm import gelu_and_slope
from tests.triton_interpreter import run_interpreted

INFINITY_BITS = 0x7F80
SMALLEST_NORMAL = 2.0**-126
GRID = torch.linspace(-14, 14, 2**16)


@triton.jit
def _gelu_kernel(x_T, gelu_T, slope_T, BLOCK_T: tl.constexpr):
    place = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    gelu, slope = gelu_and_slope(tl.load(x_T + place))
    tl.store(gelu_T + place, gelu)
    tl.store(slope_T + place, slope)


def gelu_of(x_T: Tensor) -> tuple[Tensor, Tensor]:
    gelu_T, slope_T = torch.empty_like(x_T), torch.empty_like(x_T)
    _gelu_kernel[(len(x_T) // 256,)](x_T, gelu_T, slope_T, BLOCK_T=256)
    return gelu_T, slope_T


def bfloat16_numbers() -> Tensor:
    """All 65,280 finite numbers of bfloat16, in order, in float32."""
    positive = torch.arange(INFINITY_BITS, dtype=torch.int16).view(torch.bfloat16).float()
    return torch.cat([-positive.flip(0), positive])


def _run_all() -> dict[str, tuple[Tensor, Tensor]]:
    numbers = {"bfloat16": bfloat16_numbers(), "float32": GRID, "float64": GRID.double()}
    return {name: gelu_of(x_T) for name, x_T in numbers.items()}


@pytest.fixture(scope="module")
def on_cpu() -> dict:
    return run_interpreted(_run_all)[0]


def exact_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    below = torch.special.erfc(-x * math.sqrt(0.5)) / 2
    return x * below, below + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def steps_between(first: Tensor, second: Tensor) -> Tensor:
    """How many units in the last place of bfloat16 lie between two numbers, after rounding."""
    bits = [tensor.bfloat16().view(torch.int16).int() for tensor in (first, second)]
    first, second = (torch.where(number < 0, -(number & 0x7FFF), number) for number in bits)
    return (first - second).abs()


def errors_of(x: Tensor, found: tuple[Tensor, Tensor]) -> tuple[float, float, float]:
    """The largest of erf(x / sqrt(2)) against torch.erf, of GELU and of its slope."""
    gelu, slope = (tensor.double() for tensor in found)
    erf = 2 * gelu / x - 1
    exact = exact_gelu(x)
    differences = erf - torch.erf(x * math.sqrt(0.5)), gelu - exact[0], slope - exact[1]
    return tuple(difference.abs().max().item() for difference in differences)


@pytest.mark.parametrize("dtype, bounds", [("float64", (1.5e-7, 1e-7, 1e-7)), ("float32", (5e-7, 5e-7, 3e-7))])
def test_error_of_erf_gelu_and_slope(on_cpu, dtype, bounds):
    errors = errors_of(GRID.double() if dtype == "float64" else GRID, on_cpu[dtype])
    assert all(error < bound for error, bound in zip(errors, bounds, strict=True)), errors


def test_every_number_of_bfloat16_has_its_gelu_to_one_unit_in_the_last_place(on_cpu):
    x = bfloat16_numbers()
    steps = steps_between(on_cpu["bfloat16"][0], exact_gelu(x)[0].float())
    assert steps.max() == 1 and (steps == 1).sum() < 30, steps.bincount()


@pytest.mark.gpu
def test_gelu_on_a_gpu():
    x = bfloat16_numbers()
    exact = exact_gelu(x)[0]
    steps = steps_between(gelu_of(x.cuda())[0].cpu(), exact.float())
    assert steps[exact.abs() >= SMALLEST_NORMAL].max() <= 1  # smaller ones are zero there
    errors = errors_of(GRID, tuple(tensor.cpu() for tensor in gelu_of(GRID.cuda())))
    assert max(errors) < 1e-6, errors
