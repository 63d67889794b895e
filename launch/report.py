"""Writes one HTML page that compares runs: curves, final numbers, cost, restarts, configs, spatial filters.

python launch/report.py outputs/compare_gmlp outputs/compare_amlp outputs/compare_bert --output report.html

It reads what the runs left in their folders, also while they train, and changes nothing there. The page is one file
that needs no network.
"""

import argparse
import sys
from datetime import UTC, datetime

from gmlp_scale.analysis.run_records import RunRecord, read_run_records
from gmlp_scale.analysis.run_report import Filters, filter_paths, page
from gmlp_scale.checkpoint.saved_run import read_weights
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import USER_ERRORS
from gmlp_scale.models import FAMILIES
from gmlp_scale.storage.files import plain_place, redacted, write_text
from gmlp_scale.train.filters import spatial_filters


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=plain_place, metavar="RUN_DIR_OR_URL")
    parser.add_argument("--output", required=True, metavar="FILE.html")
    parser.add_argument(
        "--no-filters",
        action="store_true",
        help="leave out the spatial filters: reading a large checkpoint from a bucket takes long",
    )
    options = parser.parse_args()
    records = read_run_records(options.runs)
    filters = [] if options.no_filters else _filters(options.runs, records)
    write_text(options.output, page(records, filters, datetime.now(UTC)))
    print(redacted(options.output))
    return 0


def _filters(folders: list[str], records: list[RunRecord]) -> list[Filters]:
    """Each run's filters, or why they cannot be read. Runs without spatial projections are left out."""
    filters = []
    for number, (folder, record) in enumerate(zip(folders, records, strict=True)):
        family = FAMILIES.get(str(record.config.get("model.kind")))
        if not family or not family.has_spatial_filters:
            continue
        try:
            checkpoint, weights = read_weights(folder)
            filters.append(Filters(number, checkpoint.step, filter_paths(spatial_filters(weights.items()))))
        except USER_ERRORS as error:
            filters.append(Filters(number, reason=redacted(str(error))))
    return filters


if __name__ == "__main__":
    sys.exit(main())
