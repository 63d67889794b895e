"""Prints how many bytes per parameter each engine's collectives carry in a step of a recipe (docs/engines.md).

torchrun --nproc_per_node 2 benchmarks/count_collectives.py --config configs/pretrain/smoke.yaml train.precision=bf16

It trains two steps of random tokens with every engine. A small model on two ranks of a CPU counts the same as a large
one, if most of its matrices have more than 100,000 elements: ZeRO-3 keeps smaller ones gathered.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.collectives import table
from benchmarks.parts import check_measurable
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import start_world
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.resolve import with_decided_precision


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


if __name__ == "__main__":
    sys.exit(main())
