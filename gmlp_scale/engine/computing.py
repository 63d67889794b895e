"""How a process computes a model: compiled or not, what is computed again, and the same bits every time if asked."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.errors import InputError

COMPILE_OPTIONS_ON_CPU = {"realize_opcount_threshold": 8}
"""Inductor stores a result of more operations than this, and computes a smaller one again at each use. With its default
it computes GELU and its derivative twice in a LayerNorm's backward pass (docs/LOG.md has the times)."""

GRAPHS_OF_BLOCKS = 32
"""dynamo's limit, which is 8, is of all blocks together, and beyond it a block runs uncompiled without an error. A
family with three kinds of block needs 12: each kind to train and to evaluate, for rows of one length and of any."""

BLOCKS_PER_GROUP = 8
"""What a compiled module costs the host it then costs once for these blocks."""


def set_up_blocks(model: nn.Module, train: TrainConfig, device: torch.device, blocks_per_group: int) -> None:
    """Applies train.recompute, groups and train.compile to the blocks, and the latter to the loss, in place."""
    compile = train.compile
    if compile == "reduce-overhead" and device.type == "cpu":
        raise InputError("train.compile is reduce-overhead, but there is no GPU here: set it to true or false")
    # Recompute comes first, inside the blocks, so that the compiler sees what to keep.
    model.set_recompute(train.recompute)
    if blocks_per_group > 1:
        model.group_blocks(blocks_per_group)
    if compile:
        torch._dynamo.config.recompile_limit = GRAPHS_OF_BLOCKS
        for module in compiled_modules(model, device):
            module.compile(
                mode="reduce-overhead" if compile == "reduce-overhead" else None,
                options=COMPILE_OPTIONS_ON_CPU if device.type == "cpu" else None,
            )
    if compile and device.type != "cpu" and hasattr(model, "row_losses"):  # a CPU gains nothing by it
        model.row_losses = torch.compile(model.row_losses)
    if compile == "reduce-overhead":
        # Each group is a graph of its own; their results live on until the next pass through the model begins.
        model.encode = _marking_step_begin(model.encode)


def compiled_modules(model: nn.Module, device: torch.device) -> nn.ModuleList:
    """The modules that are a graph each: groups on a GPU, which else waits for its host (docs/many-nodes.md).

    On a CPU they are blocks. One graph serves all of them, and is compiled in a quarter of a group's time.
    """
    return model.groups if device.type == "cuda" and model.groups else model.blocks


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
