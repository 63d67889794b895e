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
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch

from benchmarks.checkpointing import measure_checkpoint
from benchmarks.count_collectives import measure_scaling
from benchmarks.lengths import measure_lengths
from benchmarks.loading import measure_loading
from benchmarks.reports import read_report, report_as_measured, table, worsened
from benchmarks.step import measure_step
from benchmarks.timing import load_measurable, say, time_in_turns, turns_of
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.errors import InputError
from gmlp_scale.options import count
from gmlp_scale.recipe.config import RunConfig
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
    parser.add_argument("--rounds", type=count, default=7, help="timed turns of each contender (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="leave out other people's models")
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="also write the report to this file")
    worse = "name what is over 5 %% worse than in it; exit 1"
    parser.add_argument("--compare", type=local_path, metavar="FILE.json", help=worse)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.table:
        print(table(read_report(options.table)))
        return 0
    before = read_report(options.compare) if options.compare else None
    overrides, parts = ["engine.kind=single", *options.overrides], options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"--parts: found {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    runs = runs_of(options.config, overrides)
    first = next(iter(runs.values()))
    with start_world(first.engine.timeout_seconds, first.train.device, hear_stop_signals=False) as world:
        measured = measure(runs, overrides, parts, options.rounds, world, with_peers=not options.no_peers)
        report = report_as_measured(str(world.device), measured, options.output)
    lines = worsened(before, report) if before else []
    for line in lines:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if lines else 0


def runs_of(recipes: Iterable[str], overrides: list[str]) -> dict[str, RunConfig]:
    """The recipes by path. InputError if one has mistakes, or if they are for different devices."""
    runs = {path: load_measurable(path, overrides) for path in recipes}
    first, *others = runs.values()
    for run in others:
        if run.train.device != first.train.device:
            raise InputError(
                f"train.device: found {first.train.device} in {first.name} and {run.train.device} in {run.name}, but a "
                "report is of one device: add train.device=auto, cpu or cuda, which holds for all recipes"
            )
    return runs


def measure(
    runs: Mapping[str, RunConfig],
    overrides: list[str],
    parts: Iterable[str],
    num_rounds: int,
    world: World,
    *,
    with_peers: bool,
) -> Iterator[dict]:
    """The figures so far, by recipe and part, again whenever there are more."""
    recipes: dict[str, dict] = {}
    for path, run in runs.items():
        run, of_run = with_decided_precision(run, world), {}
        for part in parts:
            say(f"{run.name}: {part}")
            match part:
                case "step":
                    measured = measure_step(run, world, num_rounds, with_peers=with_peers)
                case "loader":
                    measured = [measure_loading(run, num_rounds)]
                case "checkpoint":
                    measured = measure_checkpoint(run, world, num_rounds)
                case "start_up":
                    measured = [measure_start_up(path, overrides, num_rounds)]
                case "scaling":
                    measured = measure_scaling(path, overrides, num_rounds)
                case "lengths":
                    measured = [measure_lengths(run, world.device, num_rounds)]
            for figures in measured:
                of_run[part] = figures
                yield {"recipes": recipes | {run.name: of_run}}
        recipes[run.name] = of_run


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
