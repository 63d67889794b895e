"""A training step of a recipe's model and engine on random tokens, and the time that a call takes."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS, MaskedBatch, num_masked_positions
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.run import build_engine_of


def random_batch(run: RunConfig, device: torch.device) -> MaskedBatch:
    """One micro-batch; always the same one."""
    rows, length = run.train.micro_batch_size, run.model.sequence_length
    num_masked = num_masked_positions(length, run.data.masked_fractions.last)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_SPECIAL_TOKENS, run.model.vocab_size, (rows, length), generator=generator)
    positions = torch.rand(rows, length, generator=generator).argsort(1)[:, :num_masked].sort(1).values
    return MaskedBatch(ids, positions, ids.gather(1, positions), padded=run.data.padded).to(device)


def new_engine(
    run: RunConfig, world: World, num_micro_batches: int = 1, weights: Mapping[str, Tensor] | None = None
) -> Engine:
    """The recipe's engine.

    num_micro_batches: of a step, on each rank.
    weights: by parameter name; drawn anew if None.
    """
    num_rows = num_micro_batches * world.size * run.train.micro_batch_size
    task = Pretraining(run.with_train(global_batch_size=num_rows).model_copy(update={"init_from": None}))
    if weights:
        task.initialise = partial(torch.nn.Module.load_state_dict, state_dict=weights, strict=False)
    return build_engine_of(task, world, is_new=True)


def train_step(engine: Engine, run: RunConfig, *micro_batches: MaskedBatch) -> None:
    """Forward, backward and update."""
    for index, batch in enumerate(micro_batches, start=1):
        engine.backward(engine.module(batch) / len(micro_batches), is_last=index == len(micro_batches))
    engine.step(run.optimizer.peak_learning_rate)


def forget_other_recipes(device: torch.device) -> None:
    """Frees the memory of recipes that came before, and the code that torch compiled for them: torch would generalise
    that code instead of compiling this recipe's anew."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(call: Callable[[], object], device: torch.device, num_calls: int = 1) -> float:
    """Seconds per call; the device is idle before the first and after the last."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    wait_for(device)
    return (time.perf_counter() - started) / num_calls


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
