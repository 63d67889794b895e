"""How a process computes a model: compiled or not, what is computed again, and the same bits every time if asked."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.errors import InputError

COMPILE_OPTIONS_ON_CPU = {"realize_opcount_threshold": 8}
"""Inductor stores a result of more operations than this, and computes a smaller one again at each use. With its default
it computes GELU and its derivative twice in a LayerNorm's backward pass (docs/LOG.md has the times)."""


def set_up_blocks(model: nn.Module, train: TrainConfig, device: torch.device) -> None:
    """Applies train.recompute and train.compile to the blocks, and the latter to the loss, in place."""
    compile = train.compile
    if compile == "reduce-overhead" and device.type == "cpu":
        raise InputError("train.compile is reduce-overhead, but there is no GPU here: set it to true or false")
    # Recompute comes first, inside the blocks, so that the compiler sees what to keep.
    model.set_recompute(train.recompute)
    # A whole model takes twice as long to compile as each block alone, and gains nothing more.
    if compile:
        for block in model.blocks:
            block.compile(
                mode="reduce-overhead" if compile == "reduce-overhead" else None,
                options=COMPILE_OPTIONS_ON_CPU if device.type == "cpu" else None,
            )
    if compile and device.type != "cpu" and hasattr(model, "row_losses"):  # a CPU gains nothing by it
        model.row_losses = torch.compile(model.row_losses)
    if compile == "reduce-overhead":
        # Each block is a graph of its own; their results live on until the next pass through the model begins.
        model.encode = _marking_step_begin(model.encode)


def compute_repeatably() -> None:
    """From now on this process computes the same bits from the same inputs, where torch has an algorithm for that.

    Attention is then plain matrix products: with warn_only, torch's fused backward passes still add in any order.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _marking_step_begin(encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def marking_encode(token_ids_BN: Tensor, *, padded: bool = True) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return encode(token_ids_BN, padded=padded)

    return marking_encode
