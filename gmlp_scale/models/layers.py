"""What several block families share: LayerNorm, and what a model does differently while it is exported as a program for
any batch size and any length.

Shape suffixes: B batch, H heads, N positions, K head width.
"""

import torch
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """torch's, computed in the dtype of its parameters, with the result in x's dtype.

    Engines leave the parameters in float32 beside bfloat16 activations, which torch's kernel for CUDA refuses. Its
    kernel for CPUs adds up their gradients in bfloat16: over 4,096 tokens they are 4 % off, over 65,536 tokens 20 %.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


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
