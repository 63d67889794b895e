"""Tests the paper's claims on small models with several seeds. Run again, it skips what is done and resumes the rest.

python launch/science.py --output outputs/science --shards data/compare/shards --dry-run
python launch/science.py --output outputs/science --shards data/compare/shards --part b
python launch/science.py --output outputs/science --table science.md

It first prints what is left to do and how long that takes. Several processes with the same --output share the runs.
"""

import argparse
import sys

from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.options import count
from gmlp_scale.science.claims import PARTS
from gmlp_scale.science.page import document
from gmlp_scale.science.runs import Table, budget, like_the_first_start, train_all
from gmlp_scale.storage.files import write_text
from gmlp_scale.train.agreement import start_world_of


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="DIR", help="holds the runs' folders, and results/")
    parser.add_argument("--shards", metavar="SHARDS_DIR", help="needed to train")
    titles = "; ".join(f"{part}: {title}" for part, (title, _) in PARTS.items())
    parser.add_argument("--part", action="append", choices=PARTS, help=f"may be repeated (default: all). {titles}")
    parser.add_argument(
        "--seeds", type=count, default=3, metavar="N", help="seeds of each model (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="only print what is left to do")
    what.add_argument("--table", metavar="FILE_OR_URL.md", help="write the page on what is done")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="fields of every run")
    options = parser.parse_intermixed_args()
    if not (options.shards or options.table):
        parser.error("--shards is needed without --table")
    table = Table(options.output, tuple(options.part or PARTS), options.seeds, tuple(options.overrides), options.shards)
    if options.table:
        write_text(options.table, document(table))
        print(options.table)
        return 0
    with start_world_of(next(table.runs())) as world:
        if world.size > 1:
            raise InputError("launch/science.py is one process: start it without torchrun or deepspeed")
        table = like_the_first_start(table, world, keep=not options.dry_run)
        print(budget(table, world), flush=True)
        if not options.dry_run:
            train_all(table, world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
