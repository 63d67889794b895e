"""What more ranks cost each engine: bytes sent, memory, and the time of communication and of a start.

torchrun --nproc_per_node 2 benchmarks/count_collectives.py --config configs/pretrain/smoke.yaml train.precision=bf16

This prints how many bytes per parameter each engine's collectives carry in a step of a recipe (docs/engines.md). It
trains two steps of random tokens with every engine. A small model on two ranks of a CPU counts the same as a large one,
if most of its matrices have more than 100,000 elements: ZeRO-3 keeps smaller ones gathered.

The part `scaling` of benchmarks/run.py also times 1, 2, 4 and 8 gloo ranks with a fixed batch per rank. All are
processes of this machine and share its cores. So the bytes are worth quoting, and the shares where each rank has its
own core; the seconds are not a cluster's. A rank computes on one thread, in plain PyTorch.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.profiler import ProfilerActivity, profile

from benchmarks.reports import markdown
from benchmarks.timing import print_from_ranks, say
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine import SHARDED_ENGINES, EngineConfig, Fsdp2Config, ZeroConfig
from gmlp_scale.plan.describe import count_parameters, meta_model
from gmlp_scale.plan.rank_bytes import COLLECTIVES, carried_bytes, state_bytes, wire_bytes
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.trial import count_step, new_engine, random_batch, seconds_of, train_step

NUMS_RANKS = (1, 2, 4, 8)
NUM_WARM_UP_STEPS = 2
NUM_PROFILED_STEPS = 3
HERE = ("train.device=cpu", "train.compile=false", "engine.kind=fsdp2")


@command
def main() -> int:
    return print_from_ranks(__doc__, table)


def table(run: RunConfig, world: World) -> str:
    """What a step of every engine carries and this rank's peak memory, in bytes per parameter, as a Markdown table.

    Steps have one and four micro-batches. All ranks call it together.
    """
    rows, num_parameters = [], count_parameters(run)
    for name, engine in SHARDED_ENGINES.items():
        for num_micro_batches in (1, 4):
            counts = count_step(run, engine, world, num_micro_batches)
            found = [*(counts.carried[kind] for kind in COLLECTIVES), wire_bytes(counts.carried), counts.peak]
            rows.append([name, str(num_micro_batches), *(f"{value / num_parameters:.1f}" for value in found)])
    figures = ["all-reduce", "reduce to owners", "gather", "all-to-all", "on the wire", "peak memory"]
    return markdown(["engine", "micro-batches", *figures], rows)


def measure_scaling(recipe: str, overrides: list[str], num_rounds: int) -> Iterator[dict]:
    """The figures by number of ranks (`1 ranks` and so on) and engine, and the costs, after each number of ranks.

    torch.distributed.elastic.multiprocessing.errors.ChildFailedError if a rank fails.
    """
    by_ranks, costs = {}, {}
    for num_ranks in NUMS_RANKS:
        say(f"{num_ranks} ranks")
        here = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
        launched = elastic_launch(LaunchConfig(nproc_per_node=num_ranks, max_restarts=0, **here), measure_ranks)
        measured = by_ranks[f"{num_ranks} ranks"] = launched(recipe, overrides, num_rounds, time.time())[0]
        for engine, figures in measured["engines"].items():
            if "sent_over_formula" in figures:
                costs[f"{engine} on {num_ranks} ranks: bytes sent over the formula's"] = figures["sent_over_formula"]
        yield {**by_ranks, "costs": costs}


def measure_ranks(recipe: str, overrides: list[str], num_rounds: int, started: float) -> dict:
    """Every engine's figures, and the start-up's time. All ranks call it together.

    started: when the ranks' processes were asked for, in seconds of time.time().
    """
    os.dup2(2, 1)  # what libraries print is no part of the JSON
    torch.set_num_threads(1)
    run, engines, start_up_seconds = load_run_config(recipe, [*overrides, *HERE]), {}, None
    with start_world(run.engine.timeout_seconds, "cpu", init_group=True, hear_stop_signals=False) as world:
        run = with_decided_precision(run, world)
        for name, engine in SHARDED_ENGINES.items():
            if mistakes := list(engine.mistakes(run.train)):
                engines[name] = {"not run": mistakes}
                continue
            batch, built = random_batch(run, world.device), new_engine(run.model_copy(update={"engine": engine}), world)
            step = partial(seconds_of, partial(train_step, built, run, batch), world.device)
            step()
            start_up_seconds = start_up_seconds or time.time() - started
            for _ in range(NUM_WARM_UP_STEPS - 1):
                step()
            seconds = statistics.median(step() for _ in range(num_rounds))
            engines[name] = {"step_seconds": seconds, "communication_share": communication_share(step)}
            built.close()
            engines[name] |= count(run, engine, world)
    return {"start_up_seconds": start_up_seconds, "engines": engines}


def communication_share(step: Callable[[], float]) -> float:
    """The share of a step's seconds in which this rank has a collective under way."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        seconds = sum(step() for _ in range(NUM_PROFILED_STEPS))
    collectives = [event.time_range for event in profiled.events() if event.name.startswith(("gloo:", "c10d::"))]
    return union_length((span.start, span.end) for span in collectives) / 1e6 / seconds


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line is covered by any of the spans (start, end)."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def count(run: RunConfig, engine: EngineConfig, world: World) -> dict[str, float]:
    """Bytes per parameter: sent in a step, and the peak of live tensors on the rank that has the most.

    All ranks call it together.
    """
    model, precision, num_parameters = meta_model(run), run.train.precision, count_parameters(run)
    counts = count_step(run, engine, world, num_micro_batches=1)
    states = state_bytes(engine, model, run.optimizer, precision, world.size, accumulates=False)
    figures = {
        "peak_bytes_per_parameter": max(world.gather(counts.peak)) / num_parameters,
        "planned_states_per_parameter": sum(states.values()) / num_parameters,
    }
    if isinstance(engine, Fsdp2Config | ZeroConfig):
        figures["sixteen_bytes_model"] = sixteen_bytes_model(engine, precision, world.size)
    if world.size > 1:
        sent = wire_bytes(counts.carried)
        planned = wire_bytes(carried_bytes(engine, model, run.optimizer, precision, 1, world.size))
        figures |= {"sent_bytes_per_parameter": sent / num_parameters, "sent_over_formula": sent / planned}
    return figures


def sixteen_bytes_model(engine: Fsdp2Config | ZeroConfig, precision: str, num_ranks: int) -> float:
    """Bytes per parameter and rank of weights, gradients and AdamW's states (Rajbhandari et al. 2020, figure 1).

    They are 2, 2 and 12 in bf16, and 4, 4 and 8 in float32. Stage 1 shards the states, 2 the gradients too, 3 all.
    """
    weights, gradients, states = (2, 2, 12) if precision == "bf16" else (4, 4, 8)
    stage = (3 if engine.reshard_after_forward else 2) if isinstance(engine, Fsdp2Config) else engine.stage
    sizes = [(weights, stage >= 3), (gradients, stage >= 2), (states, stage >= 1)]
    return sum(size / num_ranks if is_sharded else size for size, is_sharded in sizes)


if __name__ == "__main__":
    sys.exit(main())
