"""`train.micro_batch_size: auto`: the largest micro-batch that fits into the memory of every rank."""

import gc
import logging
from functools import partial

import torch

from gmlp_scale.config import RunConfig
from gmlp_scale.data.batch import MaskedBatch, num_masked_positions
from gmlp_scale.models import build_model
from gmlp_scale.plan.describe import MEMORY_MARGIN, divisors, largest_that_fits, micro_batch_size_on_cpu, state_bytes
from gmlp_scale.world import World

log = logging.getLogger(__name__)


def largest_micro_batch_size(run: RunConfig, world: World) -> int:
    """Rows, a divisor of a rank's rows per step: tried out on a GPU, computed on the CPU. 0 if not even one row fits.

    To be called by all ranks, before the engine takes its memory.
    """
    rows_per_rank = run.rows_per_rank(world.size)
    if world.device.type == "cuda":
        num_rows = largest_that_fits(divisors(rows_per_rank), partial(_fits_on_gpu, run, world))
    else:
        ranks_per_node = max(world.gather(world.local_rank)) + 1
        num_rows = micro_batch_size_on_cpu(run, world.size, ranks_per_node)
    num_rows = min(world.gather(num_rows))
    log.info("train.micro_batch_size: auto is %d of the %d rows of a rank", num_rows, rows_per_rank)
    return num_rows


def _fits_on_gpu(run: RunConfig, world: World, num_rows: int) -> bool:
    try:
        _run_micro_batches(run.with_micro_batch_size(num_rows), world)
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    # Out here, where the error's traceback no longer holds what the attempt had allocated.
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # the run's own is to be logged
    return fits


def _run_micro_batches(run: RunConfig, world: World) -> None:
    """Training and evaluation of a plain model beside the room for the engine's states and the margin."""
    device, num_rows = world.device, run.train.micro_batch_size
    with torch.device(device):
        model = build_model(run.model)
    model.to(torch.bfloat16 if run.train.precision == "bf16" else torch.float32).set_recompute(run.train.recompute)
    own_states = 2 * sum(parameter.nbytes for parameter in model.parameters())  # with the gradients
    margin = MEMORY_MARGIN * torch.cuda.get_device_properties(device).total_memory
    room = max(0, state_bytes(run, world.size) - own_states) + margin
    reserved = torch.empty(int(room), dtype=torch.uint8, device=device)

    num_masked = num_masked_positions(run.model.sequence_length, run.data.masked_fraction)
    token_ids_BN = torch.randint(run.model.vocab_size, (num_rows, run.model.sequence_length), device=device)
    positions_BM = torch.arange(num_masked, device=device).expand(num_rows, -1)
    labels_BM = token_ids_BN.gather(1, positions_BM)
    batch = MaskedBatch(token_ids_BN, positions_BM, labels_BM, padded=run.data.padded)
    for _ in range(2):  # the second finds the gradients of the first, as when micro-batches are accumulated
        model(batch).backward()
    with torch.no_grad():
        model.predict(batch).clone().log_softmax(-1)  # an evaluation's memory
    torch.cuda.synchronize(device)
    del reserved  # not before
