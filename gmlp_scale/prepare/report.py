"""The end of a tokenizing job: the manifest from the receipts, report.json and the printed table."""

import json
from pathlib import Path

from gmlp_scale.data.manifest import MANIFEST_NAME, Splits
from gmlp_scale.data.shards import Manifest
from gmlp_scale.data.tokenizer import MODEL_NAME, Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import check_bad_files
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.read_documents import num_bad_records
from gmlp_scale.storage.files import is_local, read_file, write_file, write_text


def finish_job(options: JobOptions, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, report.json and, last, the manifest. Print the report.

    Raises InputError where more of the input is bad than allowed, or where there is nothing to train on.
    """
    bad_files = _bad_files(options)
    check_bad_files(bad_files, options.max_bad_files)
    _check_bad_records(options)
    write_file(f"{options.output}/tokenizer/{MODEL_NAME}", read_file(f"{options.tokenizer}/{MODEL_NAME}"))
    report = _report(options, bad_files)
    write_text(f"{options.output}/report.json", json.dumps(report, indent=1) + "\n")
    _write_manifest(options, tokenizer)
    print_table(report)
    if not report["heldout_rows"]:
        print(
            f"none of the {report['documents']:,} documents is held out, so launch/pretrain.py will refuse these "
            "shards: give more documents or a larger --heldout-fraction, and another --output"
        )


def print_table(report: dict) -> None:
    for name, value in report.items():
        print(f"  {name.replace('_', ' '):36} {_shown(value)}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _bad_files(options: JobOptions) -> list[dict]:
    """What was read and lost of each broken file. Tasks that share a file all met its fault."""
    return list({bad["file"]: bad for task in options.job.read_all("bad_files") for bad in task}.values())


def _check_bad_records(options: JobOptions) -> None:
    read = options.job.total_counts("read")
    num_bad = num_bad_records(read)
    if num_bad > options.max_bad_fraction * (read["documents"] + num_bad):
        reasons = ", ".join(f"{count} {name}" for name, count in read.most_common() if name.startswith("bad: "))
        raise InputError(
            f"{num_bad} of {read['documents'] + num_bad} records are bad ({reasons.replace('bad: ', '')}), more than "
            f"--max-bad-fraction {options.max_bad_fraction}; they are listed in {options.job.url}/quarantine"
        )


def _report(options: JobOptions, bad_files: list[dict]) -> dict:
    """What the job read, refused, dropped and wrote, from the counts of its tasks.

    A broken file's bytes are counted as stored: those before its fault, and those after it. What a file that was cut
    short has lost beyond its end is unknown.
    """
    read, written = options.job.total_counts("read"), options.job.total_counts("write")
    seconds = {name.removesuffix(" seconds"): round(written[name], 2) for name in written if name.endswith(" seconds")}
    tokens, num_bytes = written["tokens"], written["bytes"]
    has_text = any(file.kind == "text" for file in options.files)
    rows = written["train rows"] + written["heldout rows"]
    reasons = {name.removeprefix("bad: "): count for name, count in sorted(read.items()) if name.startswith("bad: ")}
    return {
        "documents_read": read["documents"],
        **({"a_text_file_is": "one document, or one for each MB"} if has_text else {}),
        "bytes_read": read["bytes"],
        "bad_files": {bad["file"]: bad["reason"] for bad in bad_files},
        "bad_files_bytes_read": sum(bad["bytes_read"] for bad in bad_files),
        "bad_files_bytes_lost": sum(bad["bytes_lost"] for bad in bad_files),
        "bad_records": num_bad_records(read),
        "bad_records_by_reason": reasons,
        **_drops(options, read["documents"]),
        "documents": written["train documents"] + written["heldout documents"],
        "heldout_documents": written["heldout documents"],
        "bytes": num_bytes,
        "tokens": tokens,
        "tokens_per_byte": round(tokens / max(1, num_bytes), 4),
        "unknown_rate": round(written["unknown tokens"] / max(1, tokens), 6),
        "byte_fallback_rate": round(written["byte tokens"] / max(1, tokens), 6),
        "train_rows": written["train rows"],
        "heldout_rows": written["heldout rows"],
        "padding_fraction": round(written["padding tokens"] / max(1, rows * options.sequence_length), 6),
        "seconds_by_stage_summed_over_tasks": seconds,
        "megabytes_per_second_per_worker": round(num_bytes / 1e6 / max(1e-9, sum(seconds.values())), 3),
    }


def _drops(options: JobOptions, num_documents: int) -> dict[str, dict[str, int]]:
    """How many documents each filter read, kept and dropped; the filters in their order."""
    drops = {}
    for name in options.filters:
        kept = options.job.total_counts(name)["documents"]
        drops[name] = {"read": num_documents, "kept": kept, "dropped": num_documents - kept}
        num_documents = kept
    return drops


def _write_manifest(options: JobOptions, tokenizer: Tokenizer) -> None:
    """Write OUTPUT/manifest.json from the tasks' receipts."""
    receipts = options.job.read_all("receipts")
    assert len(receipts) == options.num_tasks
    shards = {split: [shard for receipt in receipts for shard in receipt[split]] for split in ("train", "heldout")}
    splits = Splits(**shards)
    if not splits.train:
        raise InputError("the input gave no training rows: it is empty, or every document was held out or refused")
    if is_local(options.output):  # only there do killed processes leave half-written files
        folder = Path(options.output.removeprefix("file://"))
        for path in (*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")):
            path.unlink()
    manifest = Manifest(
        sequence_length=options.sequence_length,
        vocab_size=tokenizer.vocab_size,
        packing=options.packing,
        tokenizer_sha256=tokenizer.sha256,
        total_rows=splits.total_rows,
        splits=splits,
    )
    write_text(f"{options.output}/{MANIFEST_NAME}", manifest.to_json())
