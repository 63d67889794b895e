"""Finetunes an export on MNLI, SST-2 or SQuAD; run again, it resumes, and skips what is done.

python launch/finetune.py --config configs/finetune/mnli.yaml model=HF_DIR data.train=FILE data.dev=FILE
python launch/finetune.py --config configs/finetune/sst2.yaml --grid --seeds 5 model=HF_DIR data.train=FILE ...
torchrun --nproc_per_node 8 launch/finetune.py --config configs/finetune/squad_v2.yaml engine.kind=fsdp2 ...
"""

import argparse
import sys

from gmlp_scale.config import load_config
from gmlp_scale.files import print_error
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import USER_ERRORS, finetune
from gmlp_scale.finetune.inputs import read_inputs
from gmlp_scale.finetune.sweep import describe, members, sweep
from gmlp_scale.run import exit_code, start_world_of
from gmlp_scale.world import launched_world_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe, such as configs/finetune/mnli.yaml")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs with the recipe's seed and those after it"
    )
    parser.add_argument(
        "--grid", action="store_true", help="try the recipe's grid first; the seeds run at its best point"
    )
    parser.add_argument("--dry-run", action="store_true", help="read the data, print what would be run, and leave")
    parser.add_argument("--ranks", type=int, help="of --dry-run (default: as many as are started)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_intermixed_args()
    if options.ranks is not None and (options.ranks < 1 or not options.dry_run):
        parser.error("--ranks is a positive number and needs --dry-run")
    world_size = options.ranks or launched_world_size()
    is_sweep = options.grid or options.seeds > 1
    try:
        run = load_config(FinetuneConfig, options.config, options.overrides)
        runs = members(run, grid=options.grid) if is_sweep else [run]
        for one in runs:
            one.rows_per_rank(world_size)
        if options.dry_run:
            print(describe(runs, options.seeds, read_inputs(run), world_size))
            return 0
    except USER_ERRORS as error:
        print_error(error)
        return 2
    try:
        with start_world_of(run) as world:
            inputs = read_inputs(run)
            if is_sweep:
                sweep(run, inputs, world, num_seeds=options.seeds, grid=options.grid)
            else:
                finetune(run, inputs, world)
    except USER_ERRORS as error:
        print_error(error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
