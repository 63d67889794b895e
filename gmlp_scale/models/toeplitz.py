"""Toeplitz matrices: one number per offset between two positions, built without a gather."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gmlp_scale.models.layers import is_exporting


def toeplitz(offsets: Tensor) -> Tensor:
    """The matrix W[..., i, j] = offsets[..., (n - 1) + (j - i)], for any leading dimensions.

    offsets: [..., 2n - 1]. Number n - 1 is on the diagonal, the later numbers are to its right (later positions), the
    earlier ones to its left. Returns [..., n, n] in the dtype of `offsets`. The gradient of an offset is the sum over
    its diagonal, in float32 (float64 for float64) and in one fixed order, so it repeats bit for bit.
    """
    if is_exporting():  # its programs take no window of a symbolic size, and need no gradient
        n = (offsets.shape[-1] + 1) // 2
        positions = torch.arange(n, device=offsets.device)
        return offsets[..., n - 1 + positions - positions[:, None]]
    return _Toeplitz.apply(offsets)


class _Toeplitz(torch.autograd.Function):
    """W[i] is the n offsets from number n - 1 - i on.

    Indexing would give the same matrix, but its backward pass adds atomically on a GPU.
    """

    @staticmethod
    def forward(ctx, offsets: Tensor) -> Tensor:
        n = (offsets.shape[-1] + 1) // 2
        return offsets.unfold(-1, n, 1).flip(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return diagonal_sums(grad).to(grad.dtype)


def diagonal_sums(matrix: Tensor) -> Tensor:
    """The sum over each diagonal of [..., n, n], in the order of the offsets: [..., 2n - 1], in float32 or float64.

    Zeros are put on both sides of every line of the matrix, and each line is read from one element further on than the
    line above. The diagonals are then columns.
    """
    n = matrix.shape[-1]
    padded = F.pad(matrix, (n - 1, n)).contiguous()
    shifted = padded.as_strided((*matrix.shape[:-1], 2 * n - 1), (*padded.stride()[:-2], 3 * n, 1))
    return shifted.sum(-2, dtype=torch.promote_types(matrix.dtype, torch.float32))
