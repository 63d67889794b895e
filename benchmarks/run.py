"""Times a recipe's training step, loader, checkpoints and start beside their peers and the machine's ceilings, and
counts what more ranks cost.

python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml --output docs/benchmarks/FILE.json   # on a GPU
python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml model.num_blocks=6 train.micro_batch_size=2
python benchmarks/run.py --config configs/pretrain/gmlp_base.yaml --compare docs/benchmarks/FILE.json
python benchmarks/run.py --config configs/pretrain/smoke.yaml --parts scaling  # 1, 2, 4 and 8 gloo ranks
python benchmarks/run.py --table docs/benchmarks/FILE.json

Prints JSON. Only ratios within one run are worth quoting: benchmarks/__init__.py says how they are measured.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.comparison import read_report, table, worsened
from benchmarks.parts import PARTS, USUAL_PARTS, measure
from gmlp_scale.distributed.logs import command
from gmlp_scale.storage.files import local_path, write_text


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
    parser.add_argument(
        "--compare",
        type=local_path,
        metavar="FILE.json",
        help="name what is over 5 %% worse than in it; exit 1",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.rounds < 1:
        parser.error("--rounds is a positive number")
    if options.table:
        print(table(read_report(options.table)))
        return 0
    before = read_report(options.compare) if options.compare else None
    date, parts = datetime.date.today().isoformat(), options.parts.split(",")
    machine, recipes = measure(
        options.config, options.overrides, parts, options.rounds, with_peers=not options.no_peers
    )
    report = {"date": date, "machine": machine, "command": sys.argv[1:], "recipes": recipes}
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        write_text(options.output, text + "\n")
    lines = worsened(before, report) if before else []
    for line in lines:
        print(f"worse: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
