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
from gmlp_scale.engine import SHARDED_ENGINES
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


if __name__ == "__main__":
    sys.exit(main())
