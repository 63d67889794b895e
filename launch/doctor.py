"""Checks before a long run what would make it fail or slow. Start it like the run, on the run's nodes.

python launch/doctor.py --config configs/pretrain/gmlp_base.yaml engine.kind=single
torchrun --nproc_per_node 8 launch/doctor.py --config configs/pretrain/gmlp_base.yaml data.shards=data/c4_512
deepspeed --hostfile hosts launch/doctor.py --config configs/pretrain/gmlp_base.yaml engine.kind=zero engine.stage=1

Prints versions, devices, drivers and clocks of every rank, and then a line for each check: the collectives (GB/s and
whether their results are right), room and speed of the disk or store for checkpoints, the shards, the checkpoint that
the run would resume from, the engine's gradients beside those of one process, the first steps of the whole recipe, and
the loader's speed beside theirs. A line begins with ok, slow or FAILS; after slow and FAILS it says what to change. A
line that begins with "trying" comes before a check that may take minutes. A check that waits for one that FAILS is not
run. Nothing is left behind.

The exit code is 0 if the run would go, 1 if it would fail, 2 if the recipe has mistakes.
"""

import argparse
import sys

from gmlp_scale.distributed.logs import command, set_up_logging
from gmlp_scale.distributed.world import start_world
from gmlp_scale.doctor.checkup import Checkup
from gmlp_scale.recipe.reader import load_run_config


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: gmlp_base")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    run = load_run_config(options.config, options.overrides)
    needs_group = run.engine.needs_process_group
    with start_world(
        run.engine.timeout_seconds, run.train.device, init_group=needs_group, hear_stop_signals=False
    ) as world:
        set_up_logging(world)
        checkup = Checkup(run, world)
        checkup.examine()
        if world.is_main:
            print(f"{checkup.num_failed} checks FAIL" if checkup.num_failed else "the run can start")
    return 1 if checkup.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
