"""Draws one metric of several runs against the step, from their metrics.jsonl, in one picture.

python launch/plot_metrics.py --runs outputs/compare_gmlp outputs/compare_amlp --output compare.png
"""

import argparse
import math
import sys
from pathlib import Path

from gmlp_scale.analysis.curves import is_drawable
from gmlp_scale.analysis.run_records import curve
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import local_path, plain_place
from gmlp_scale.train.sinks import read_metrics


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, type=plain_place, metavar="RUN_DIR_OR_URL")
    parser.add_argument("--tag", default="eval/perplexity", help="a key of metrics.jsonl (default: %(default)s)")
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE.png")
    options = parser.parse_args()

    from matplotlib.figure import Figure

    is_log = not options.tag.endswith("/loss")  # a loss is already a logarithm
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for run_dir in options.runs:
        lines = read_metrics(f"{run_dir}/metrics.jsonl")
        if not lines:
            raise InputError(f"{run_dir}: no metrics.jsonl, or an empty one; --runs takes run folders")
        points = curve(lines, options.tag)
        if not points:
            tags = sorted({tag for line in lines for tag in line} - {"step"}) or ["none"]
            raise InputError(f"{run_dir}/metrics.jsonl: no line has {options.tag}; there are {', '.join(tags)}")
        steps, values = zip(*points, strict=True)
        shown = [value if is_drawable(value, is_log=is_log) else math.nan for value in values]
        axes.plot(steps, shown, marker=".", label=f"{Path(run_dir).name} ({values[-1]:.4g})")
    axes.set(xlabel="step", ylabel=options.tag, yscale="log" if is_log else "linear")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=120, format="png")
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
