"""Decides `train.precision: auto`: bf16 where a block of the recipe's shape trains faster in it than in float32."""

import logging
import time
from collections.abc import Callable

import torch

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.float32_vectors import round_matrices
from gmlp_scale.models import build_model
from gmlp_scale.recipe.config import PretrainingRecipe, split_step
from gmlp_scale.recipe.reader import read_recipe_file
from gmlp_scale.storage.files import read_file

log = logging.getLogger(__name__)

MEASURING_SECONDS = 0.6
"""How long the two blocks take turns. The pass that is under way at the end is finished."""
NUM_TOKENS = 512


def with_decided_precision(run: PretrainingRecipe, world: World) -> PretrainingRecipe:
    """`run` with float32 or bf16 in place of auto. All ranks call it together; rank 0 decides.

    A run that was started before keeps its precision. A GPU takes bf16 if it has it; on a CPU a block is timed.
    """
    if run.train.precision != "auto":
        return run
    found = []
    world.on_main(lambda: found.append(_precision_so_far(run) or _faster_precision(run, world.device)))
    return run.with_precision(world.broadcast(found[0] if found else None))


def _precision_so_far(run: PretrainingRecipe) -> str | None:
    """What the config.yaml of the run, or of the run that it branches off, says; None for a new run."""
    branched_off = [split_step(run.branch_from)[0]] if run.branch_from else []
    for folder in [run.run_folder, *branched_off]:
        try:
            read_file(f"{folder}/config.yaml")
        except FileNotFoundError:
            continue
        return read_recipe_file(f"{folder}/config.yaml")["train"]["precision"]
    return None


def _faster_precision(run: PretrainingRecipe, device: torch.device) -> str:
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
