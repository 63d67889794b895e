"""Toeplitz matrices: one number per offset between two positions, built without a gather."""

import torch
import torch.nn.functional as F
from torch import Tensor


def toeplitz(offsets: Tensor) -> Tensor:
    """The matrix W[..., i, j] = offsets[..., (n - 1) + (j - i)], for any leading dimensions.

    offsets: [..., 2n - 1]; number n - 1 stands on the diagonal, those after it to its right (later positions),
    those before it to its left. Returns [..., n, n] in the dtype of `offsets`. The gradient of each offset is the sum
    over its diagonal, taken in float32 (float64 for float64) and in one fixed order, so that it repeats bit for bit.
    """
    return _Toeplitz.apply(offsets)


class _Toeplitz(torch.autograd.Function):
    """Rows of 2n numbers (the offsets and one zero) read again as rows of 2n - 1 shift by one place a row.

    An index gather would give the same matrix, but its backward adds atomically on a GPU.
    """

    @staticmethod
    def forward(ctx, offsets: Tensor) -> Tensor:
        *leading, num_offsets = offsets.shape
        n = (num_offsets + 1) // 2
        repeated = F.pad(offsets, (0, 1)).unsqueeze(-2).expand(*leading, n, 2 * n).reshape(*leading, 2 * n * n)
        shifted = repeated[..., : n * num_offsets].unflatten(-1, (n, num_offsets))
        return shifted[..., n - 1 :].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return diagonal_sums(grad).to(grad.dtype)


def diagonal_sums(matrix: Tensor) -> Tensor:
    """The sum over each diagonal of [..., n, n], in the order of the offsets: [..., 2n - 1].

    Taken and returned in float32 (float64 for float64). The same shift by one place a row, backwards.
    """
    n = matrix.shape[-1]
    shifted = F.pad(F.pad(matrix, (n - 1, 0)).flatten(-2), (0, n)).unflatten(-1, (n, 2 * n))
    return shifted.sum(-2, dtype=torch.promote_types(matrix.dtype, torch.float32))[..., : 2 * n - 1]
