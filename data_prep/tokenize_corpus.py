"""Tokenizes a corpus, packs it into rows and writes them as shards, by any number of tasks.

python data_prep/tokenize_corpus.py --input 'corpus/*.jsonl.gz' --tokenizer TOKENIZER_DIR --sequence-length 512 \\
    --output SHARDS_DIR --tasks 64 --workers 16
python data_prep/tokenize_corpus.py --input hf:allenai/c4:en:train --tasks 1024 ...

Killed at any point and run again, it finishes the tasks that are not done; the bytes are the same as of a job that
was never disturbed. The manifest is written last.
"""

import argparse
import sys
import time

from data_prep.dedup import DEDUPLICATIONS
from data_prep.estimate import estimate
from data_prep.input_files import InputFile, find_inputs
from data_prep.job_folder import JobError, JobFolder
from data_prep.read_documents import num_hub_files
from data_prep.report import check_bad_fraction, make_report, print_table, write_manifest, write_report
from data_prep.run_job import run_passes
from data_prep.write_shards import PACKINGS
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.files import read_file, write_file


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="SOURCE", help="globs, URLs or hf:NAME:CONFIG:SPLIT"
    )
    parser.add_argument("--tokenizer", required=True, metavar="TOKENIZER_DIR")
    parser.add_argument("--sequence-length", type=int, required=True, help="tokens in a row")
    parser.add_argument("--output", required=True, metavar="SHARDS_DIR")
    parser.add_argument("--heldout-fraction", type=float, default=0.005, help="of the documents, chosen by their text")
    parser.add_argument("--packing", choices=PACKINGS, default="packed")
    parser.add_argument("--dedup", nargs="+", choices=DEDUPLICATIONS, default=[], help="drop documents that come again")
    parser.add_argument(
        "--decontaminate", nargs="+", metavar="FILE", default=[], help="texts that none may share 13 words with"
    )
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--tasks", type=int, help="default: one for each input file")
    parser.add_argument("--workers", type=int, default=1, help="tasks that run at the same time")
    parser.add_argument("--executor", choices=("local", "slurm", "ray"), default="local")
    parser.add_argument("--slurm-partition", help="needed with --executor slurm")
    parser.add_argument("--slurm-time", default="12:00:00", help="limit of one task")
    parser.add_argument("--shard-bytes", type=int, default=8 << 20)
    parser.add_argument("--max-record-bytes", type=int, default=4_000_000, help="longer records are refused")
    parser.add_argument("--max-bad-fraction", type=float, default=0.01, help="more bad records than this end the job")
    parser.add_argument("--dry-run", action="store_true", help="read a sample and print what the job would give")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    try:
        check(options)
        tokenizer = Tokenizer(options.tokenizer)
        files, num_tasks = plan_tasks(options)
        if options.dry_run:
            print_table(dry_run(options, files, tokenizer))
            return 0
        job = JobFolder(options.output)
        with job.begun(settings(options, files, num_tasks, tokenizer)):
            return run(options, files, num_tasks, tokenizer, job)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def check(options: argparse.Namespace) -> None:
    """ValueError naming the first option that cannot be."""
    for name, lowest, highest in (
        ("sequence_length", 4, 1 << 16),
        ("heldout_fraction", 0, 0.999),
        ("max_bad_fraction", 0, 1),
        ("workers", 1, 1 << 16),
        ("shard_bytes", 2 * options.sequence_length, 1 << 31),
        ("max_record_bytes", 1, 1 << 31),
    ):
        if not lowest <= getattr(options, name) <= highest:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is {getattr(options, name)}; it must be between {lowest} and {highest}")
    if options.tasks is not None and options.tasks < 1:
        raise ValueError(f"--tasks is {options.tasks}; it must be at least 1")
    if (options.executor == "slurm") != (options.slurm_partition is not None):
        raise ValueError("--executor slurm and --slurm-partition go together: give both or neither")
    is_hub = [source.startswith("hf:") and not source.startswith("hf://") for source in options.input]
    if any(is_hub) and len(is_hub) > 1:
        raise ValueError("--input hf:NAME:CONFIG:SPLIT must be the only source of a job")
    if any(is_hub) and options.input[0].count(":") != 3:
        raise ValueError(
            f"--input {options.input[0]} is not of the form hf:NAME:CONFIG:SPLIT, as hf:allenai/c4:en:train"
        )


def plan_tasks(options: argparse.Namespace) -> tuple[list[InputFile], int]:
    """The input files (none for a data set of the hub) and the number of tasks."""
    if options.input[0].startswith("hf:") and not options.input[0].startswith("hf://"):
        return [], options.tasks or num_hub_files(options.input[0])
    files = find_inputs(options.input)
    return files, options.tasks or len(files)


def dry_run(options: argparse.Namespace, files: list[InputFile], tokenizer: Tokenizer) -> dict[str, int | float]:
    if not files:
        raise ValueError("--dry-run needs files: a data set of the hub does not tell its size before it is read")
    return estimate(
        files,
        tokenizer,
        sequence_length=options.sequence_length,
        shard_bytes=options.shard_bytes,
        workers=options.workers,
        text_field=options.text_field,
        max_record_bytes=options.max_record_bytes,
    )


def settings(options: argparse.Namespace, files: list[InputFile], num_tasks: int, tokenizer: Tokenizer) -> dict:
    """Everything that the output's bytes depend on."""
    names = (
        "sequence_length", "heldout_fraction", "packing", "text_field", "shard_bytes", "max_record_bytes",
        "dedup", "decontaminate",
    )  # fmt: skip
    return {name: getattr(options, name) for name in names} | {
        "tasks": num_tasks,
        "tokenizer_sha256": tokenizer.sha256,
        "inputs": [[file.url, file.num_bytes] for file in files] or options.input,
    }


def filter_names(options: argparse.Namespace) -> list[str]:
    """The filters of the job, in their order."""
    return [*(["decontaminate"] if options.decontaminate else []), *options.dedup]


def run(
    options: argparse.Namespace, files: list[InputFile], num_tasks: int, tokenizer: Tokenizer, job: JobFolder
) -> int:
    """Run the tasks that are not done and, if then all are, finish; the exit code."""
    started = time.monotonic()
    try:
        if run_passes(options, files, num_tasks, job):
            finish(options, num_tasks, tokenizer, job)
            print(f"shards in {options.output}, after {time.monotonic() - started:.1f} s")
        else:
            print("submitted to Slurm; when the jobs have ended, the same command writes the manifest")
    except (JobError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the tasks that are not done", file=sys.stderr)
        return 130
    return 0


def finish(options: argparse.Namespace, num_tasks: int, tokenizer: Tokenizer, job: JobFolder) -> None:
    """Write tokenizer, report and, last, the manifest."""
    check_bad_fraction(job, options.max_bad_fraction)
    write_file(f"{options.output}/tokenizer/{MODEL_NAME}", read_file(f"{options.tokenizer}/{MODEL_NAME}"))
    report = make_report(job, filters=filter_names(options), sequence_length=options.sequence_length)
    write_report(job, report)
    write_manifest(
        job, tokenizer, num_tasks=num_tasks, sequence_length=options.sequence_length, packing=options.packing
    )
    print_table(report)


if __name__ == "__main__":
    sys.exit(main())
