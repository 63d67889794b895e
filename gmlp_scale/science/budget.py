"""What the runs that are left will take: their FLOPs over the rate at which this process trains."""

import time
from collections.abc import Callable
from functools import partial

import torch

from gmlp_scale.data.shards import Manifest
from gmlp_scale.distributed.world import World
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.science.claims import PARTS, RATES
from gmlp_scale.science.runs import HELDOUT_ROWS, Table
from gmlp_scale.trial.random_step import new_engine, random_batch, seconds_of, train_step


def budget(table: Table, world: World) -> str:
    """A line for each part. A model that several parts share counts in the first of them."""
    lines = [f"{'part':6}{'models':>6}{'runs left':>11}{'PFLOP':>9}{'hours':>9}{'in all':>9}"]
    seen, hours_in_all = set(), 0.0
    for part in (part for part in PARTS if part in table.parts):
        models = [model for model in PARTS[part][1] if model not in seen]
        seen.update(models)
        left = {model: table.num_left(model) for model in models}
        runs = {model: table.run(model, RATES[0], 0) for model in models if left[model]}
        flops = {model: _flops(run) for model, run in runs.items()}
        hours = sum(left[model] * flops[model] / _flop_rate(run, world) / 3600 for model, run in runs.items())
        hours_in_all += hours
        pflop = sum(left[model] * flops[model] / 1e15 for model in runs)
        numbers = f"{len(models):6}{sum(left.values()):11}{pflop:9.3f}{hours:9.2f}{hours_in_all:9.2f}"
        lines.append(f"{part:6}{numbers}")
    precision = table.run(table.models[0], RATES[0], 0).train.precision
    lines.append(
        f"hours of one process like this, in {precision}, with {torch.get_num_threads()} CPU threads on free cores"
    )
    return "\n".join(lines)


def _flops(run: RunConfig) -> float:
    """FLOPs of a whole run with its evaluations, which have no backward pass."""
    train, num_heldout = run.train, Manifest.load(run.data.shards).num_rows("heldout")
    num_evaluated = train.num_steps // train.evaluate_every_steps * min(train.num_evaluation_rows, num_heldout)
    num_evaluated += min(HELDOUT_ROWS, num_heldout)
    return run.flops_per_step().before(train.num_steps) + run.flops_per_row().last * num_evaluated / 3


def _flop_rate(run: RunConfig, world: World) -> float:
    """FLOPs per second of the best of three training steps. On a CPU it is the rate on free cores: CPU time counts."""
    step = partial(train_step, new_engine(run, world), run, random_batch(run, world.device))
    step()  # the first one takes longer
    seconds = min(_seconds(step, world.device) for _ in range(3))
    return run.flops_per_row().last * run.train.micro_batch_size / seconds


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        return seconds_of(call, device)
    started = time.process_time()
    call()
    return (time.process_time() - started) / torch.get_num_threads()
