"""Tokenizes a corpus, packs it into rows and writes the rows as shards, in any number of tasks.

python data_prep/tokenize_corpus.py --input 'corpus/*.jsonl.gz' --tokenizer TOKENIZER_DIR --sequence-length 512 \\
    --output SHARDS_DIR --tasks 64 --workers 16
python data_prep/tokenize_corpus.py --input hf:allenai/c4:en:train --tasks 1024 ...

A job that was killed at any point goes on when the same command is run again: it runs the tasks that are not done and
writes the same bytes as a job that was never disturbed. The manifest is written last.
"""

import argparse
import sys
import time
from dataclasses import MISSING, fields

from gmlp_scale.data.json_tokenizer import open_tokenizer
from gmlp_scale.distributed.logs import command
from gmlp_scale.prepare.dedup import DEDUPLICATIONS
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.report import estimate, finish_job, print_table
from gmlp_scale.prepare.run_job import run_passes
from gmlp_scale.prepare.write_shards import PACKINGS
from gmlp_scale.storage.files import plain_place, redacted


def parse_options() -> JobOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "(default: %(default)s)"
    sources = (
        "globs, URLs, ranges as part-{000..127}.tar, or one hf:NAME:CONFIG:SPLIT; a line of JSON is a document; so is "
        "a text file, or each MB of a longer one"
    )
    add("--input", nargs="+", required=True, metavar="SOURCE", help=sources)
    folder = "that train_tokenizer.py wrote, or one of Hugging Face with tokenizer.json"
    add("--tokenizer", required=True, metavar="TOKENIZER_DIR", help=folder)
    add("--sequence-length", type=int, required=True, help="tokens in a row")
    add(
        "--output",
        type=plain_place,
        required=True,
        metavar="SHARDS_DIR",
        help="a new folder, or that of the same job to go on with",
    )
    end_token = "stands behind each document; for a tokenizer.json (default: its template's or its eos_token)"
    add("--end-token", metavar="TOKEN", help=end_token)
    add("--heldout-fraction", type=float, help=f"of the documents, chosen by their text {default}")
    add("--packing", choices=PACKINGS, help=f"rows of many documents, or of one each {default}")
    add("--dedup", nargs="+", choices=DEDUPLICATIONS, help="drop documents that come again (default: keep them)")
    add("--decontaminate", nargs="+", metavar="FILE", help="texts that none may share 13 words with (default: none)")
    add("--text-field", help=f"of each record {default}")
    add("--tasks", type=int, help="(default: one for each input file)")
    add("--workers", type=int, help=f"tasks that run at the same time {default}")
    add("--executor", choices=("local", "slurm", "ray"), help=f"where tasks run {default}")
    add("--slurm-partition", help="needed with --executor slurm (default: none)")
    add("--slurm-time", help=f"limit of one task {default}")
    add("--shard-bytes", type=int, help=f"size of a shard {default}")
    add("--max-record-bytes", type=int, help=f"longer records are refused {default}")
    add("--max-bad-fraction", type=float, help=f"more bad records than this end the job {default}")
    add("--max-bad-files", type=int, help=f"more broken files end the job, else they are read so far {default}")
    add("--dry-run", action="store_true", help="read a sample and print what the job would give")
    parser.set_defaults(**{field.name: field.default for field in fields(JobOptions) if field.default is not MISSING})
    return JobOptions(**vars(parser.parse_args()))


@command
def main() -> int:
    options, started = parse_options(), time.monotonic()
    tokenizer = open_tokenizer(options.tokenizer)
    if options.dry_run:
        print_table(estimate(options, tokenizer))
        return 0
    with options.job.begun(options.settings(tokenizer)):
        try:
            if run_passes(options):
                finish_job(options, tokenizer)
                print(f"shards in {redacted(options.output)}, after {time.monotonic() - started:.1f} s")
            else:
                print("submitted to Slurm; when the jobs have ended, the same command writes the manifest")
        except KeyboardInterrupt:
            print("stopped; the same command goes on with the tasks that are not done", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
