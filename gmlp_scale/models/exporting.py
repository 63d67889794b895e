"""What a model does differently while it is exported as a program for any batch size and any length.

Shape suffixes: B batch, H heads, N positions, K head width.
"""

import torch
from torch import Tensor


def is_exporting() -> bool:
    """True while torch.export or torch.onnx.export traces the model. Training, compiled or not, never sees True.

    While torch.compile traces, some versions of torch say that they export.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def flatten_heads(attended_BHNK: Tensor) -> Tensor:
    """[B, N, H K]. The attention of an ONNX program has a memory layout of its own, which may allow no view."""
    attended_BNHK = attended_BHNK.transpose(1, 2)
    if is_exporting():
        attended_BNHK = attended_BNHK.clone(memory_format=torch.contiguous_format)
    return attended_BNHK.flatten(2)
