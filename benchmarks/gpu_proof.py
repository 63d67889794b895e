"""What launch/gpu_proof.sh runs beside the benchmarks: checks, each of which prints a line of JSON for each finding.

python benchmarks/gpu_proof.py environment [--tiny]
python benchmarks/gpu_proof.py gpu_tests
python benchmarks/gpu_proof.py engines --config configs/pretrain/gmlp_base.yaml model.num_blocks=4 train.compile=false
python benchmarks/gpu_proof.py record OUT PART --code 0 --seconds 12 --limit 40 --command TEXT --printed FILE
python benchmarks/gpu_proof.py record OUT PART --not-run REASON

A check leaves with 1 if anything failed. record adds a part to OUT/results.jsonl, writes OUT/report.md anew, and leaves
with 1 unless the part passed or was not run.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.proof_report import record, record_not_run
from gmlp_scale.storage.files import local_path

RUNS = ("engines", "recipe", "stop", "auto", "compile")


def main() -> int:
    options = _parser().parse_args()
    if options.part == "record":
        if options.not_run:
            line = record_not_run(options.folder, options.name, options.not_run)
        else:
            facts = {"code": options.code, "seconds": options.seconds, "limit": options.limit}
            printed = options.printed.read_text(encoding="utf-8")
            line = record(options.folder, options.name, **facts, command=options.command, printed=printed)
        print(f"{line['part']}: {line['status']}" + (f" ({line['reason']})" if line["reason"] else ""))
        return 0 if line["status"] in ("passed", "not run") else 1

    findings, has_failed = _stdout_for_findings(), False

    def report(finding: dict) -> None:
        nonlocal has_failed
        has_failed |= finding["status"] == "failed"
        print(json.dumps(finding), file=findings, flush=True)

    match options.part:
        case "environment":
            from benchmarks.device_facts import environment

            report(environment(needs_gpu=not options.tiny))
        case "gpu_tests":
            from benchmarks.device_facts import run_gpu_tests

            run_gpu_tests(report)
        case _:
            from benchmarks.proof import CHECKS
            from benchmarks.trial import Trial

            with tempfile.TemporaryDirectory() as folder:
                CHECKS[options.part](Trial.prepare(options.config, options.overrides, Path(folder)), report)
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    facts = parts.add_parser("environment")
    facts.add_argument("--tiny", action="store_true", help="a trial, which needs no GPU")
    parts.add_parser("gpu_tests")
    for name in RUNS:
        runs = parts.add_parser(name)
        runs.add_argument("--config", required=True)
        runs.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    adding = parts.add_parser("record")
    adding.add_argument("folder", type=local_path, metavar="OUT")
    adding.add_argument("name", metavar="PART")
    adding.add_argument("--not-run", metavar="REASON")
    adding.add_argument("--code", type=int, help="the exit code of the part's command")
    adding.add_argument("--seconds", type=int)
    adding.add_argument("--limit", type=int)
    adding.add_argument("--command")
    adding.add_argument("--printed", type=local_path, metavar="FILE", help="the part's standard output")
    return parser


def _stdout_for_findings() -> TextIO:
    """The standard output. What libraries print goes to standard error from now on."""
    findings = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return findings


if __name__ == "__main__":
    sys.exit(main())
