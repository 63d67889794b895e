"""Evaluates checkpoints or an export on held-out rows with fixed masks, beside a guess from token frequencies alone.

python launch/evaluate.py --run outputs/gmlp_base --shards data/c4_512
python launch/evaluate.py --run outputs/gmlp_base --shards data/c4_512 --all-steps --output curve.json
python launch/evaluate.py --run outputs/gmlp_base --shards data/c4_512 \\
    --finetune-probe sst2 data.train=train.tsv data.dev=dev.tsv

--all-steps also writes the figures to RUN_DIR/tensorboard/evaluation, in place of what was there. --finetune-probe
exports the checkpoint, finetunes it for 200 steps with the task's recipe, and adds the dev score to
RUN_DIR/tensorboard/probe.
"""

import argparse
import json
import sys

from gmlp_scale.analysis.heldout import (
    add_probe_scores,
    evaluate_models,
    load_probe,
    single_process,
    table,
    write_curve,
)
from gmlp_scale.checkpoint.saved_run import read_all_steps, read_run
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World
from gmlp_scale.options import count
from gmlp_scale.storage.files import plain_place, write_text
from gmlp_scale.tasks.table import TASKS


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--run", type=plain_place, metavar="RUN_DIR_OR_URL", help="a run of launch/pretrain.py")
    model.add_argument("--export", metavar="HF_DIR_OR_URL", help="a folder that launch/export.py wrote")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=int, help="the checkpoint after this step (default: the newest good one)")
    steps.add_argument("--all-steps", action="store_true", help="every complete checkpoint of the run")
    parser.add_argument("--shards", required=True, metavar="SHARDS_DIR", help="shards with held-out rows")
    rows = "how many held-out rows, from the first on (default: train.num_evaluation_rows, as in training)"
    parser.add_argument("--rows", type=count, help=rows)
    parser.add_argument("--output", metavar="FILE_OR_URL.json", help="also write the figures to this file")
    parser.add_argument("--finetune-probe", choices=TASKS, metavar="TASK", help=f"one of {', '.join(TASKS)}")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="fields of the probe's recipe")
    options = parser.parse_intermixed_args()
    if options.export and (options.step is not None or options.all_steps or options.finetune_probe):
        parser.error("--step, --all-steps and --finetune-probe need --run")
    if options.overrides and not options.finetune_probe:
        parser.error(f"{options.overrides[0]}: only --finetune-probe takes such fields")
    with single_process("launch/evaluate.py") as world:
        _evaluate(options, world)
    return 0


def _evaluate(options: argparse.Namespace, world: World) -> None:
    """Prints and writes the figures, also where what follows the evaluation fails."""
    task = options.finetune_probe
    probe = load_probe(task, options.overrides, options.run) if task else None
    if options.export:
        models = [read_export(options.export)]
    else:
        models = read_all_steps(options.run) if options.all_steps else [read_run(options.run, options.step)]
    content = evaluate_models(models, options.shards, options.rows, world)
    try:
        if options.all_steps:
            write_curve(content, options.run)
        if probe:
            add_probe_scores(content, options.run, probe, world)
    finally:
        print(f"{options.run or options.export}: {table(content)}")
        if options.output:
            write_text(options.output, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
