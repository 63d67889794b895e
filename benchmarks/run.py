"""Times a recipe's training step, loader, checkpoints and start beside their peers and the machine's ceilings, and
counts what more ranks cost.

python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml --output docs/benchmarks/FILE.json   # on a GPU
python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml model.num_blocks=6 train.micro_batch_size=2
python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml --compare docs/benchmarks/FILE.json
python benchmarks/run.py --config configs/pretrain/smoke.yaml --parts scaling  # 1, 2, 4 and 8 gloo ranks
python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml --parts lengths model.num_blocks=6  # short texts
python benchmarks/run.py --table docs/benchmarks/FILE.json

Prints JSON. Only ratios within one run are worth quoting: benchmarks/__init__.py says how they are measured.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch

from benchmarks.checkpointing import measure_checkpoint
from benchmarks.lengths import measure_lengths
from benchmarks.loading import measure_loading
from benchmarks.reports import print_report, read_report, table, worsened
from benchmarks.scaling import measure_scaling
from benchmarks.step import measure_step
from benchmarks.timing import say, time_in_turns, turns_of
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import start_world
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError, RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.storage.files import local_path
from gmlp_scale.train.resolve import with_decided_precision

USUAL_PARTS = ("step", "loader", "checkpoint", "start_up")
PARTS = (*USUAL_PARTS, "scaling", "lengths")
PRETRAIN = Path(__file__).parents[1] / "launch/pretrain.py"


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", action="append", help="a recipe, whose micro-batch is timed; may be repeated")
    what.add_argument("--table", type=local_path, metavar="FILE.json", help="only print this report as Markdown tables")
    usual, known = ",".join(USUAL_PARTS), ",".join(PARTS)
    parser.add_argument("--parts", default=usual, help=f"parts of {known} (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each contender (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out other people's models")
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="also write the report to this file")
    worse = "name what is over 5 %% worse than in it; exit 1"
    parser.add_argument("--compare", type=local_path, metavar="FILE.json", help=worse)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.rounds < 1:
        parser.error("--rounds is a positive number")
    if options.table:
        print(table(read_report(options.table)))
        return 0
    before = read_report(options.compare) if options.compare else None
    device, recipes = measure(
        options.config, options.overrides, options.parts.split(","), options.rounds, with_peers=not options.no_peers
    )
    report = print_report(device, {"recipes": recipes}, options.output)
    lines = worsened(before, report) if before else []
    for line in lines:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if lines else 0


def measure(
    recipes: Iterable[str], overrides: Iterable[str], parts: list[str], num_rounds: int, *, with_peers: bool
) -> tuple[torch.device, dict]:
    """The device, and the figures of every part of every recipe, by recipe and part.

    Raises:
        InputError: a part is unknown, or the recipes are for different devices.
        ConfigError: a recipe has mistakes, or a micro-batch size of auto.
        DeviceError: the recipes' device is not there.
    """
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"--parts: found {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    overrides = ["engine.kind=single", *overrides]
    runs = {path: load_run_config(path, overrides) for path in recipes}
    check_measurable(runs)
    first, figures = next(iter(runs.values())), {}
    with start_world(first.engine.timeout_seconds, first.train.device, hear_stop_signals=False) as world:
        for path, run in runs.items():
            run = with_decided_precision(run, world)
            of_run = figures[run.name] = {}
            for part in parts:
                say(f"{run.name}: {part}")
                match part:
                    case "step":
                        of_run[part] = measure_step(run, world, num_rounds, with_peers=with_peers)
                    case "loader":
                        of_run[part] = measure_loading(run, num_rounds)
                    case "checkpoint":
                        of_run[part] = measure_checkpoint(run, world, num_rounds)
                    case "start_up":
                        of_run[part] = measure_start_up(path, overrides, num_rounds)
                    case "scaling":
                        of_run[part] = measure_scaling(path, overrides, num_rounds)
                    case "lengths":
                        of_run[part] = measure_lengths(run, world.device, num_rounds)
        return world.device, figures


def check_measurable(runs: Mapping[str, RunConfig]) -> None:
    if undecided := [path for path, run in runs.items() if run.train.micro_batch_size == "auto"]:
        raise ConfigError(undecided[0], ["train.micro_batch_size: found auto; needed: a number, the rows timed here"])
    first, *others = runs.values()
    for run in others:
        if run.train.device != first.train.device:
            raise InputError(
                f"train.device: found {first.train.device} in {first.name} and {run.train.device} in {run.name}, but a "
                "report is of one device: add train.device=auto, cpu or cuda, which holds for all recipes"
            )


def measure_start_up(recipe: str, overrides: list[str], num_rounds: int) -> dict:
    """How long a dry run takes in a fresh process, beside importing torch alone."""
    commands = {
        "python": ["-c", ""],
        "import_torch": ["-c", "import torch"],
        "dry_run": [str(PRETRAIN), "--config", recipe, "--dry-run", *overrides],
    }
    calls = {
        name: partial(subprocess.run, [sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        for name, words in commands.items()
    }
    seconds = time_in_turns(turns_of(calls, torch.device("cpu")), num_rounds)
    return {"seconds": seconds, "costs": {"dry_run_over_import_torch": seconds["dry_run"] / seconds["import_torch"]}}


if __name__ == "__main__":
    sys.exit(main())
