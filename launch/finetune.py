"""Finetunes an export on a task of GLUE, all of GLUE, SQuAD or tagging. Run again, it resumes and skips what is done.

python launch/finetune.py --config configs/finetune/mnli.yaml model=HF_DIR data.train=FILE data.dev=FILE
python launch/finetune.py --config configs/finetune/sst2.yaml --grid --seeds 5 model=HF_DIR data.train=FILE ...
python launch/finetune.py --config configs/finetune/glue.yaml --glue GLUE_DIR --seeds 5 --grid model=HF_DIR
torchrun --nproc_per_node 8 launch/finetune.py --config configs/finetune/squad_v2.yaml engine.kind=fsdp2 ...
"""

import argparse
import itertools
import sys

from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.rendezvous import launched
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import finetune, read_inputs
from gmlp_scale.finetune.glue import glue_runs, run_glue, to_markdown
from gmlp_scale.finetune.sweep import describe, members, sweep
from gmlp_scale.options import count
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config
from gmlp_scale.storage.files import local_path
from gmlp_scale.train.agreement import start_world_of

_OF_GRID = {
    "train.global_batch_size": "grid.global_batch_size",
    "optimizer.peak_learning_rate": "grid.peak_learning_rate",
}


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe's file, or its name: mnli")
    parser.add_argument(
        "--seeds", type=count, default=1, metavar="N", help="runs with the recipe's seed and the next ones (default: 1)"
    )
    parser.add_argument(
        "--grid", action="store_true", help="try the recipe's grid first; the seeds run at its best point"
    )
    parser.add_argument(
        "--glue", type=local_path, metavar="GLUE_DIR", help="finetune on all of GLUE; the folders CoLA to RTE are here"
    )
    parser.add_argument(
        "--from-mnli", action="store_true", help="with --glue: MRPC, STS-B and RTE start from the model of MNLI"
    )
    parser.add_argument("--dry-run", action="store_true", help="only read the data and print what would be run")
    parser.add_argument("--ranks", type=count, help="with --dry-run: how many ranks (default: as many as are started)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed's launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.ranks and not options.dry_run:
        parser.error("--ranks needs --dry-run")
    if options.from_mnli and not options.glue:
        parser.error("--from-mnli needs --glue")
    if options.grid:
        _refuse_fields_of_grid(options.config, options.overrides)
    world_size, is_sweep = options.ranks or launched().size, options.glue or options.grid or options.seeds > 1
    if options.glue:
        runs = glue_runs(options.config, options.overrides, options.glue)
    else:
        runs = [load_config(FinetuneConfig, options.config, options.overrides)]
    first_runs = [members(run, grid=options.grid) if is_sweep else [run] for run in runs]  # they wait for no scores
    if options.dry_run:
        _check_ranks(first_runs, world_size)
        for run, first in zip(runs, first_runs, strict=True):
            print(describe(first, options.seeds, read_inputs(run), world_size))
        return 0
    with start_world_of(*runs, seeds=options.seeds, grid=options.grid, from_mnli=options.from_mnli) as world:
        _check_ranks(first_runs, world_size)
        if options.glue:
            table = run_glue(runs, world, num_seeds=options.seeds, grid=options.grid, from_mnli=options.from_mnli)
            if table and world.is_main:
                print(to_markdown(table), end="")
        elif is_sweep:
            sweep(runs[0], read_inputs(runs[0]), world, num_seeds=options.seeds, grid=options.grid)
        else:
            finetune(runs[0], read_inputs(runs[0]), world)
    return 0


def _check_ranks(first_runs: list[list[FinetuneConfig]], world_size: int) -> None:
    """Raises ConfigError if one of the runs does not fit this number of ranks."""
    for run in itertools.chain(*first_runs):
        run.rows_per_rank(world_size)


def _refuse_fields_of_grid(recipe: str, overrides: list[str]) -> None:
    """Raises ConfigError for each field that --grid would replace by its own values."""
    given = [override.partition("=") for override in overrides]
    mistakes = [
        f"{field}={value}: --grid takes {of_grid}; give {of_grid}=[{value}], or leave --grid out"
        for field, _, value in given
        if (of_grid := _OF_GRID.get(field))
    ]
    if mistakes:
        raise ConfigError(recipe, mistakes)


if __name__ == "__main__":
    sys.exit(main())
