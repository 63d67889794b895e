"""Prints how many bytes per parameter each engine's collectives carry in a step of a recipe (docs/engines.md).

torchrun --nproc_per_node 2 benchmarks/count_collectives.py --config configs/pretrain/smoke.yaml train.precision=bf16

It trains two steps of random tokens with every engine. A small model on two ranks of a CPU counts the same as a large
one, if most of its matrices have more than 100,000 elements: ZeRO-3 keeps smaller ones gathered.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.reports import markdown
from benchmarks.run import check_measurable
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine import SHARDED_ENGINES, EngineConfig
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.plan.rank_bytes import COLLECTIVES, wire_bytes
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.trial import count_step


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: smoke")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    run = load_run_config(options.config, options.overrides)
    check_measurable({options.config: run})
    with start_world(run.engine.timeout_seconds, run.train.device, init_group=True) as world:
        lines = table(with_decided_precision(run, world), world)
        if world.is_main:
            print(lines)
    return 0


def bytes_per_parameter(run: RunConfig, engine: EngineConfig, world: World, num_micro_batches: int) -> dict[str, float]:
    """What a step carries by each kind of collective and on the wire, and this rank's peak memory.

    All ranks call it together.
    """
    counts = count_step(run, engine, world, num_micro_batches)
    counted = {kind: counts.carried[kind] for kind in COLLECTIVES}
    counted |= {"wire": wire_bytes(counts.carried), "peak memory": counts.peak}
    num_parameters = count_parameters(run)
    return {name: num_bytes / num_parameters for name, num_bytes in counted.items()}


def table(run: RunConfig, world: World) -> str:
    """Every engine's bytes per parameter and step, with one and with four micro-batches, in Markdown."""
    figures = ["all-reduce", "reduce to owners", "gather", "all-to-all", "on the wire", "peak memory"]
    rows = []
    for name, engine in SHARDED_ENGINES.items():
        for num_micro_batches in (1, 4):
            counted = bytes_per_parameter(run, engine, world, num_micro_batches)
            rows.append([name, str(num_micro_batches), *(f"{value:.1f}" for value in counted.values())])
    return markdown(["engine", "micro-batches", *figures], rows)


if __name__ == "__main__":
    sys.exit(main())
