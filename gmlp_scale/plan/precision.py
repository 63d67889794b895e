"""Whether a block of a recipe's shape trains faster in bf16 than in float32, for `train.precision: auto`."""

import logging
import time
from collections.abc import Callable

import torch

from gmlp_scale.engine.float32_vectors import round_matrices
from gmlp_scale.models import build_model
from gmlp_scale.recipe.config import PretrainingRecipe

log = logging.getLogger(__name__)

MEASURING_SECONDS = 0.6
"""How long the two blocks take turns. The pass that is under way at the end is finished."""
NUM_TOKENS = 512


def faster_precision(run: PretrainingRecipe, device: torch.device) -> str:
    """float32 or bf16 for a run on this device. A GPU is asked whether it has bf16, a CPU is timed."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    passes = {precision: _training_pass(run, precision) for precision in ("float32", "bf16")}
    seconds = dict.fromkeys(passes, float("inf"))
    for training_pass in passes.values():  # the first takes longer
        training_pass()
    deadline = time.perf_counter() + MEASURING_SECONDS
    while time.perf_counter() < deadline:
        for precision, training_pass in passes.items():
            started = time.process_time()  # of this process alone: other programs may hold the cores meanwhile
            training_pass()
            seconds[precision] = min(seconds[precision], time.process_time() - started)
    fastest = min(seconds, key=seconds.__getitem__)
    shown = ", ".join(f"{1000 * value:.1f} ms in {precision}" for precision, value in seconds.items())
    log.info("train.precision: auto is %s (a block's forward and backward pass takes CPU time of %s)", fastest, shown)
    return fastest


def _training_pass(run: PretrainingRecipe, precision: str) -> Callable[[], None]:
    """Forward and backward pass of one block."""
    model = build_model(run.model.model_copy(update={"num_blocks": 1, "vocab_size": 1}))
    round_matrices(model, precision)
    num_rows = max(1, NUM_TOKENS // run.model.sequence_length)
    shape_BND, dtype = (num_rows, run.model.sequence_length, run.model.d_model), model.embedding.weight.dtype
    x_BND = torch.ones(shape_BND, dtype=dtype, requires_grad=True)
    return lambda: model.blocks[0](x_BND).backward(x_BND.detach())
