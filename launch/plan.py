"""Says what a run would take on a cluster under every engine, the fastest that fits first. Starts nothing.

python launch/plan.py --config configs/pretrain/gmlp_base.yaml --gpus 64 --gpu h100 --nodes 8
"""

import argparse
import sys
from typing import Annotated

from pydantic import Field

from gmlp_scale.distributed.logs import command
from gmlp_scale.options import count, option
from gmlp_scale.plan.layouts import GPUS, Assumptions, table
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.trial import describe_fake_step


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: gmlp_base")
    parser.add_argument("--gpus", type=count, required=True, help="GPUs on all nodes together")
    parser.add_argument("--gpu", choices=GPUS, required=True)
    parser.add_argument("--nodes", type=count, default=1, help="(default: %(default)s)")
    fractions = {"type": option(Annotated[float, Field(gt=0, le=1)]), "metavar": "F", "help": "(default: %(default)s)"}
    parser.add_argument("--fraction-of-peak", default=Assumptions.fraction_of_peak, **fractions)
    parser.add_argument("--fraction-of-link", default=Assumptions.fraction_of_link, **fractions)
    parser.add_argument(
        "--fake-ranks", type=count, metavar="N", help="also build FSDP2 for N ranks on fake tensors and count a step"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.gpus % options.nodes:
        parser.error(f"--gpus {options.gpus} is no multiple of --nodes {options.nodes}")
    assumed = Assumptions(
        GPUS[options.gpu], options.gpus, options.nodes, options.fraction_of_peak, options.fraction_of_link
    )
    run = load_run_config(options.config, options.overrides)
    if run.train.precision == "auto":
        run = run.with_train(precision="bf16")  # as a run decides on every one of GPUS
    print(table(run, assumed))
    if options.fake_ranks:
        print(describe_fake_step(run, options.fake_ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
