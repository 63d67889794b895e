"""Times a training step of each model of a part of docs/science.md, in turns, and sets the losses against that time.

python benchmarks/mixers.py --part f train.precision=bf16
python benchmarks/mixers.py --part f train.device=cuda train.compile=true train.precision=bf16

Prints Markdown. A step is forward, backward and update of the recipe's micro-batch, on random tokens. The losses are
those of the evaluations on seed 0's way, by results in --output. Between two of them the line is straight; before the
first and after the last there is a dash. A run's rate falls to zero at its end, so a loss on the way is higher than
that of a run which ends there.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import numpy as np

from benchmarks.timing import time_in_turns, turns_of
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import start_world
from gmlp_scale.options import count
from gmlp_scale.science.claims import PARTS, RATES
from gmlp_scale.science.page import spread
from gmlp_scale.science.runs import Table
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.trial import new_engine, random_batch, train_step

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the time that the whole run of the part's first model takes."""


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="f", choices=PARTS, help="(default: %(default)s)")
    parser.add_argument("--output", default="docs/science", metavar="DIR", help="has results/ (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=9, help="timed turns of each model (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="fields of every run")
    options = parser.parse_intermixed_args()
    table = Table(options.output, (options.part,), 3, tuple(options.overrides))
    print("\n".join(lines_of(table, options.rounds)))
    return 0


def lines_of(table: Table, num_rounds: int) -> list[str]:
    """The table, a row for each model."""
    runs = {model: table.run(model, table.chosen_rate(model, table.parts[0]) or RATES[0], 0) for model in table.models}
    first = runs[table.models[0]]
    with start_world(first.engine.timeout_seconds, first.train.device, hear_stop_signals=False) as world:
        calls = {}
        for model, run in runs.items():
            run = with_decided_precision(run, world)
            calls[model] = partial(train_step, new_engine(run, world), run, random_batch(run, world.device))
        seconds = time_in_turns(turns_of(calls, world.device), num_rounds)
    at = ", ".join(f"{share:g}" for share in SHARES)
    titles = "model", "parameters", "forward GFLOPs a row", "tokens/s", "time", "loss", f"seed 0's at {at} of the time"
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for model, run in runs.items():
        time = seconds[model] / seconds[table.models[0]]
        tokens = run.train.micro_batch_size * run.model.sequence_length
        losses = [*table.losses(model, table.parts[0]).values()]
        cells = [
            model, f"{table.num_parameters(model):,}", f"{run.flops_per_row().last / 3e9:.3f}",
            f"{tokens / seconds[model]:,.0f}", f"{time:.2f}", spread(losses) if losses else "not run",
            losses_at(table.result(run), time),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def losses_at(result: dict | None, time: float) -> str:
    """The losses at SHARES of the first model's time. `time`: what the whole run takes, in that unit."""
    if not (evaluations := (result or {}).get("evaluations")):
        return "not kept" if result else "not run"
    steps, losses = zip(*evaluations, strict=True)
    at = np.interp([share / time * steps[-1] for share in SHARES], steps, losses, left=np.nan, right=np.nan)
    return ", ".join("-" if np.isnan(loss) else f"{loss:.3f}" for loss in at)


if __name__ == "__main__":
    sys.exit(main())
