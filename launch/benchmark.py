"""Times a recipe's training step, loader, checkpoints and start beside the machine's ceilings and their peers.

python launch/benchmark.py --config configs/pretrain/gmlp_base.yaml --output docs/benchmarks/FILE.json   # on a GPU
python launch/benchmark.py --config configs/pretrain/gmlp_base.yaml model.num_blocks=6 train.micro_batch_size=2
python launch/benchmark.py --config configs/pretrain/gmlp_base.yaml --compare docs/benchmarks/FILE.json
python launch/benchmark.py --table docs/benchmarks/FILE.json

Prints JSON. gmlp_scale/benchmark says how it is measured; only ratios within one run are worth quoting.
"""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from gmlp_scale.benchmark.checkpointing import measure_checkpoint
from gmlp_scale.benchmark.comparison import read_report, table, worsened
from gmlp_scale.benchmark.dry_run import measure_start_up
from gmlp_scale.benchmark.loading import measure_loading
from gmlp_scale.benchmark.step import measure_step
from gmlp_scale.benchmark.timing import say
from gmlp_scale.config import ConfigError, load_run_config
from gmlp_scale.run import USER_ERRORS
from gmlp_scale.world import World, start_world

PARTS = ("step", "loader", "checkpoint", "start_up")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", action="append", help="a recipe; its micro-batch is the batch timed here; repeatable")
    what.add_argument("--table", type=Path, metavar="FILE.json", help="print a report as a Markdown table and leave")
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts to measure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each contender (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out other people's models")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE.json", help="name every ratio that is over 5 %% worse than there; exit 1"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_intermixed_args()
    try:
        if options.table:
            print(table(read_report(options.table)))
            return 0
        before = read_report(options.compare) if options.compare else None
        report = measure(options)
        text = json.dumps(report, indent=1)
        print(text)
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(text + "\n", encoding="utf-8")
        lines = worsened(before, report) if before else []
    except (*USER_ERRORS, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in lines:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if lines else 0


def measure(options: argparse.Namespace) -> dict:
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts: found {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    overrides = ["engine.kind=single", *options.overrides]
    runs = {path: load_run_config(path, overrides) for path in options.config}
    if undecided := [path for path, run in runs.items() if run.train.micro_batch_size == "auto"]:
        raise ConfigError(undecided[0], ["train.micro_batch_size: found auto; needed: a number, the rows timed here"])
    report = {"date": datetime.date.today().isoformat(), "machine": {}, "command": sys.argv[1:], "recipes": {}}
    first, *others = runs.values()
    for run in others:
        if run.train.device != first.train.device:
            raise ValueError(
                f"train.device: found {first.train.device} in {first.name} and {run.train.device} in {run.name}, but a "
                "report is of one device: add train.device=auto, cpu or cuda, which holds for all recipes"
            )
    with start_world(first.engine.timeout_seconds, first.train.device, hear_stop_signals=False) as world:
        report["machine"] = describe_machine(world)
        for path, run in runs.items():
            figures = report["recipes"][run.name] = {}
            for part in parts:
                say(f"{run.name}: {part}")
                match part:
                    case "step":
                        figures[part] = measure_step(run, world, options.rounds, with_peers=not options.no_peers)
                    case "loader":
                        figures[part] = measure_loading(run, options.rounds)
                    case "checkpoint":
                        figures[part] = measure_checkpoint(run, world, options.rounds)
                    case "start_up":
                        figures[part] = measure_start_up(path, overrides, options.rounds)
    return report


def describe_machine(world: World) -> dict:
    device = world.device
    cpu = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({cpu})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
