"""Pretrains the model of a recipe. The same command run again resumes from the newest complete checkpoint.

python launch/pretrain.py --config configs/pretrain/smoke.yaml engine.kind=single
deepspeed launch/pretrain.py --config configs/pretrain/gmlp_base.yaml engine.kind=zero engine.stage=1
torchrun --nproc_per_node 8 launch/pretrain.py --config configs/pretrain/gmlp_base.yaml engine.kind=fsdp2
"""

import argparse
import sys

from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.rendezvous import launched
from gmlp_scale.options import count, positive
from gmlp_scale.plan.describe import describe
from gmlp_scale.plan.layouts import describe_fit
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.start import check_start, load_recipe


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: gmlp_base")
    parser.add_argument("--dry-run", action="store_true", help="only print what the run would be")
    parser.add_argument("--ranks", type=count, help="with --dry-run: how many ranks (default: as many as are started)")
    parser.add_argument(
        "--gpu-memory", type=positive, metavar="GB", help="with --dry-run: say whether the run fits into such GPUs"
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if (options.ranks or options.gpu_memory) and not options.dry_run:
        parser.error("--ranks and --gpu-memory need --dry-run")
    world_size = options.ranks or launched().size
    run = load_recipe(options.config, options.overrides)
    if options.dry_run:
        run.rows_per_rank(world_size)
        check_start(run)
        print(describe(run, world_size))
        if options.gpu_memory:
            print(describe_fit(run, world_size, options.gpu_memory))
        return 0
    pretrain(run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
