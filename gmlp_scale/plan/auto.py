"""Decides what is `auto` in a recipe's train section: the faster precision, and the largest micro-batch that fits."""

import gc
import logging
import math
import time
from collections.abc import Callable

import torch

from gmlp_scale.data.batch import MaskedBatch, num_masked_positions
from gmlp_scale.distributed.world import World
from gmlp_scale.engine.float32_vectors import round_matrices
from gmlp_scale.models import build_model
from gmlp_scale.plan.rank_bytes import state_bytes
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, RunConfig

log = logging.getLogger(__name__)

MEASURING_SECONDS = 0.6
"""How long the two blocks take turns. The pass that is under way at the end is finished."""
NUM_TOKENS = 512
MEMORY_MARGIN = 0.05
"""The share of a GPU's memory that stays free for the buffers of collectives and libraries, and for fragmentation."""
OUT_OF_MEMORY_WORDS = (
    "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED"
)  # fmt: skip
"""What errors say when memory is lacking outside torch's allocator: errors of CUDA, of Triton when it loads a kernel,
and of libraries. cuBLAS is "not initialized" when its handle finds no memory."""
HEAD_BYTES_PER_LOGIT = 12
"""Bytes at the peak of the loss, and of an evaluation."""


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


def largest_micro_batch_size(run: RunConfig, world: World) -> int:
    """Tries the divisors of a rank's rows per step and returns the largest that fits; 0 if not even one row does.

    All ranks call it together, before the engine takes its memory.

    Raises:
        ConfigError: there is no GPU.
        OtherRankError: an attempt of another rank failed, and not for lack of memory. That rank raises its own error.
    """
    if world.device.type != "cuda":
        raise ConfigError(run.name, ["train.micro_batch_size: found auto on a CPU; give a number: auto needs a GPU"])
    started = time.perf_counter()
    rows_per_rank = math.gcd(*run.rows_per_rank(world.size).values)
    divisors = [number for number in range(rows_per_rank, 0, -1) if rows_per_rank % number == 0]
    num_rows = min(world.on_all(lambda: next((number for number in divisors if _fits(run, world, number)), 0)))
    seconds = time.perf_counter() - started
    log.info("train.micro_batch_size: auto is %d of a rank's %d rows (%.1f s)", num_rows, rows_per_rank, seconds)
    return num_rows


def _fits(run: RunConfig, world: World, num_rows: int) -> bool:
    try:
        _run_micro_batches(run.with_train(micro_batch_size=num_rows), world)
        fits = True
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(w in str(error) for w in OUT_OF_MEMORY_WORDS):
            raise
        log.info("%d rows do not fit: %s", num_rows, str(error).partition("\n")[0])
        fits = False
    # Out here, the error's traceback no longer holds the tensors of the attempt.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # memory/peak_gib must not show the attempt
    return fits


def _run_micro_batches(run: RunConfig, world: World) -> None:
    """Trains and evaluates a plain model, with memory set aside for the engine's other states and the margin."""
    device, num_rows, precision = world.device, run.train.micro_batch_size, run.train.precision
    with torch.device(device):
        model = build_model(run.model, seed=None)
    states = state_bytes(
        run.engine, model, run.optimizer, precision, world.size, accumulates=run.accumulates(world.size)
    )
    round_matrices(model, precision).set_recompute(run.train.recompute)
    own_states = 2 * sum(parameter.nbytes for parameter in model.parameters())  # parameters and gradients
    margin = MEMORY_MARGIN * torch.cuda.get_device_properties(device).total_memory
    num_masked = num_masked_positions(run.model.sequence_length, max(run.data.masked_fractions.values))
    # A run keeps this too, and an attempt does not: CUDA graphs do not lend the blocks' memory to the head.
    has_graphs = run.train.compile == "reduce-overhead"
    head_bytes = HEAD_BYTES_PER_LOGIT * num_rows * num_masked * run.model.vocab_size if has_graphs else 0
    room = max(0, sum(states.values()) - own_states) + head_bytes + margin
    reserved = torch.empty(int(room), dtype=torch.uint8, device=device)

    token_ids_BN = torch.randint(run.model.vocab_size, (num_rows, run.model.sequence_length), device=device)
    positions_BM = torch.arange(num_masked, device=device).expand(num_rows, -1)
    labels_BM = token_ids_BN.gather(1, positions_BM)
    batch = MaskedBatch(token_ids_BN, positions_BM, labels_BM, padded=run.data.padded)
    for _ in range(2):  # the second adds to the first one's gradients, as accumulated micro-batches do
        model(batch).backward()
    with torch.no_grad():
        model.predict(batch).clone().log_softmax(-1)  # as an evaluation does
    torch.cuda.synchronize(device)
    del reserved  # only now
