"""Tokenizes a corpus, packs it into rows and writes the rows as shards, in any number of tasks.

python data_prep/tokenize_corpus.py --input 'corpus/*.jsonl.gz' --tokenizer TOKENIZER_DIR --sequence-length 512 \\
    --output SHARDS_DIR --tasks 64 --workers 16
python data_prep/tokenize_corpus.py --input hf:allenai/c4:en:train --tasks 1024 ...

A job that was killed at any point goes on when the same command is run again: it runs the tasks that are not done and
writes the same bytes as a job that was never disturbed. The manifest is written last.
"""

import argparse
import json
import sys
import time

from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.distributed.logs import command
from gmlp_scale.prepare.dedup import DEDUPLICATIONS
from gmlp_scale.prepare.estimate import estimate
from gmlp_scale.prepare.job_folder import JobFolder
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.report import check_input, make_report, print_table, write_manifest
from gmlp_scale.prepare.run_job import run_passes
from gmlp_scale.prepare.write_shards import PACKINGS
from gmlp_scale.storage.files import read_file, redacted, write_file, write_text


def parse_options() -> JobOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="globs, URLs, ranges as part-{000..127}.tar, or one hf:NAME:CONFIG:SPLIT; a line of JSON is a document; "
        "so is a text file, or each MB of a longer one",
    )
    add("--tokenizer", required=True, metavar="TOKENIZER_DIR", help="that train_tokenizer.py wrote")
    add("--sequence-length", type=int, required=True, help="tokens in a row")
    add("--output", required=True, metavar="SHARDS_DIR", help="a new folder, or that of the same job to go on with")
    add("--heldout-fraction", type=float, help="of the documents, chosen by their text (default: %(default)s)")
    add("--packing", choices=PACKINGS, help="rows of many documents, or of one each (default: %(default)s)")
    add("--dedup", nargs="+", choices=DEDUPLICATIONS, help="drop documents that come again (default: keep them)")
    add("--decontaminate", nargs="+", metavar="FILE", help="texts that none may share 13 words with (default: none)")
    add("--text-field", help="of each record (default: %(default)s)")
    add("--tasks", type=int, help="(default: one for each input file)")
    add("--workers", type=int, help="tasks that run at the same time (default: %(default)s)")
    add("--executor", choices=("local", "slurm", "ray"), help="where tasks run (default: %(default)s)")
    add("--slurm-partition", help="needed with --executor slurm (default: none)")
    add("--slurm-time", help="limit of one task (default: %(default)s)")
    add("--shard-bytes", type=int, help="size of a shard (default: %(default)s)")
    add("--max-record-bytes", type=int, help="longer records are refused (default: %(default)s)")
    add("--max-bad-fraction", type=float, help="more bad records than this end the job (default: %(default)s)")
    add(
        "--max-bad-files",
        type=int,
        help="more broken files end the job; allowed ones are read so far (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="read a sample and print what the job would give")
    fields = JobOptions.model_fields.items()
    parser.set_defaults(**{name: field.default for name, field in fields if not field.is_required()})
    return JobOptions.checked(vars(parser.parse_args()))


@command
def main() -> int:
    options = parse_options()
    tokenizer = Tokenizer(options.tokenizer)
    if options.dry_run:
        print_table(estimate(options, tokenizer))
        return 0
    job = JobFolder(options.output)
    with job.begun(options.settings(tokenizer)):
        return run(options, tokenizer, job)


def run(options: JobOptions, tokenizer: Tokenizer, job: JobFolder) -> int:
    """Run the tasks that are not done and, if all are done then, finish the job. Returns the exit code."""
    started = time.monotonic()
    try:
        if run_passes(options, job):
            finish(options, tokenizer, job)
            print(f"shards in {redacted(options.output)}, after {time.monotonic() - started:.1f} s")
        else:
            print("submitted to Slurm; when the jobs have ended, the same command writes the manifest")
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the tasks that are not done", file=sys.stderr)
        return 130
    return 0


def finish(options: JobOptions, tokenizer: Tokenizer, job: JobFolder) -> None:
    """Write the tokenizer, the report and, last, the manifest."""
    check_input(job, options)
    write_file(f"{options.output}/tokenizer/{MODEL_NAME}", read_file(f"{options.tokenizer}/{MODEL_NAME}"))
    report = make_report(job, options)
    write_text(f"{options.output}/report.json", json.dumps(report, indent=1) + "\n")
    write_manifest(job, options, tokenizer)
    print_table(report)
    if not report["heldout_rows"]:
        print(
            f"none of the {report['documents']:,} documents is held out, so launch/pretrain.py will refuse these "
            "shards: give more documents or a larger --heldout-fraction, and another --output"
        )


if __name__ == "__main__":
    sys.exit(main())
