"""What a tokenizing job would write, from a sample; and its end: manifest, report.json and the printed table."""

import json
import math
import time
from collections import Counter

from gmlp_scale.data.json_tokenizer import AnyTokenizer, JsonTokenizer
from gmlp_scale.data.manifest import MANIFEST_NAME, Splits
from gmlp_scale.data.shards import Manifest, row_dtype
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_documents import bad_records, check_bad_records, records_of_task
from gmlp_scale.prepare.read_records import Record, check_bad_files
from gmlp_scale.prepare.write_shards import PACKINGS
from gmlp_scale.storage.files import read_file, write_file, write_text

_MAX_PARTS = 8  # files, or parts of a data set of the hub, of which a sample is taken
_SAMPLE_BYTES_PER_PART = 500_000


def estimate(options: JobOptions, tokenizer: AnyTokenizer) -> dict[str, int | float | str]:
    """Reads and tokenizes the beginnings of a few files, or of a few parts of a data set of the hub."""
    started = time.perf_counter()
    sample, num_bad_files, scale = _sample(options, tokenizer)
    seconds = time.perf_counter() - started
    found = {
        "sampled_documents": sample["documents"],
        "sampled_bad_files": num_bad_files,
        "sampled_bad_records": sample["bad records"],
        "sampled_tokens_per_byte": round(sample["tokens"] / max(1, sample["bytes"]), 4),
    }
    if scale is None:
        return found | {"estimated_documents": "unknown, for the data set does not say its size"}
    documents, rows = round(scale * sample["documents"]), round(scale * sample["rows"])
    return found | {
        "estimated_documents": documents,
        "estimated_bytes": round(scale * sample["bytes"]),
        "estimated_tokens": round(scale * sample["tokens"]),
        "estimated_rows": rows,
        "estimated_shards": _num_shards(options, tokenizer, documents, rows),
        "estimated_output_bytes": rows * options.sequence_length * row_dtype(tokenizer.vocab_size).itemsize,
        "estimated_hours": round(scale * seconds / options.workers / 3600, 3),
    }


def _sample(options: JobOptions, tokenizer: AnyTokenizer) -> tuple[Counter, int, float | None]:
    """(what the beginnings of a few parts hold, number of broken files, how many times this the whole input holds).

    The last is None unless every part was read to its end or the data set's card has its number of rows.
    """
    data_set = options.hub_stream() if options.hub_data_set else None
    num_parts = data_set.num_shards if options.hub_data_set else len(options.files)
    special, dtype = options.special_ids(tokenizer), row_dtype(tokenizer.vocab_size)
    packing = PACKINGS[options.packing](options.sequence_length, special, dtype)
    sample, bad_files = Counter(), []
    for part in range(num_parts)[:: max(1, num_parts // _MAX_PARTS)][:_MAX_PARTS]:
        most_bytes = sample["bytes"] + _SAMPLE_BYTES_PER_PART
        for _, record, bytes_read in records_of_task(options, part, num_parts, bad_files):
            if isinstance(record, Record):
                num_tokens = len(tokenizer.encode(record.text))
                sample["documents"] += 1
                sample["bytes"] += len(record.text.encode())
                sample["tokens"] += num_tokens + 1
                sample["rows"] += packing.rows_filled(num_tokens)
            else:
                sample["bad records"] += 1
                if options.hub_data_set and record.reason != "empty text":
                    raise InputError(f"--text-field is {options.text_field!r}; the data set has {record.excerpt}")
            if sample["bytes"] >= most_bytes:
                sample["stored bytes"] += bytes_read
                break
        else:
            sample["whole parts"] += 1
            sample["stored bytes"] += 0 if options.hub_data_set else options.files[part].num_bytes
    if not options.hub_data_set:
        scale = sum(file.num_bytes for file in options.files) / max(1, sample["stored bytes"])
    elif sample["whole parts"] == num_parts:
        scale = 1.0
    else:
        split = (data_set.info.splits or {}).get(options.hub_data_set[2])
        num_rows = split.num_examples if split else None
        scale = num_rows / max(1, sample["documents"] + sample["bad records"]) if num_rows else None
    return sample, len(bad_files), scale


def _num_shards(options: JobOptions, tokenizer: AnyTokenizer, documents: int, rows: int) -> int:
    """Each task writes shards of its own for each split that it has a document of."""
    num_shards = 0
    for share in (1 - options.heldout_fraction, options.heldout_fraction):
        tasks = min(options.num_tasks, round(share * documents))
        if tasks:
            num_shards += tasks * math.ceil(share * rows / tasks / options.rows_per_shard(tokenizer.vocab_size))
    return num_shards


def finish_job(options: JobOptions, tokenizer: AnyTokenizer) -> None:
    """Write the tokenizer, report.json and, last, the manifest. Print the report.

    Raises InputError where more of the input is bad than allowed, or where there is nothing to train on.
    """
    bad_files = {bad["file"]: bad for task in options.job.read_all("bad_files") for bad in task}  # tasks share files
    check_bad_files(list(bad_files.values()), options.max_bad_files)
    check_bad_records(options, options.job.total_counts("read"), f"they are listed in {options.job.url}/quarantine")
    for name in tokenizer.files:
        write_file(f"{options.output}/tokenizer/{name}", read_file(f"{options.tokenizer}/{name}"))
    report = _report(options, tokenizer, list(bad_files.values()))
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


def _report(options: JobOptions, tokenizer: AnyTokenizer, bad_files: list[dict]) -> dict:
    """What the job read, refused, dropped and wrote, from the counts of its tasks.

    A broken file's bytes are counted as stored: those before its fault, and those after it. What a file that was cut
    short has lost beyond its end is unknown.
    """
    read, written = options.job.total_counts("read"), options.job.total_counts("write")
    seconds = {name.removesuffix(" seconds"): round(written[name], 2) for name in written if name.endswith(" seconds")}
    tokens, num_bytes = written["tokens"], written["bytes"]
    has_text = any(file.kind == "text" for file in options.files)
    rows = written["train rows"] + written["heldout rows"]
    bad = bad_records(read)
    drops, num_documents = {}, read["documents"]
    for name in (*["decontaminate"] * bool(options.decontaminate), *options.dedup):  # the filters, in their order
        kept = options.job.total_counts(name)["documents"]
        drops[name] = {"read": num_documents, "kept": kept, "dropped": num_documents - kept}
        num_documents = kept
    report = {
        "documents_read": read["documents"],
        **({"a_text_file_is": "one document, or one for each MB"} if has_text else {}),
        "bytes_read": read["bytes"],
        "bad_files": {file["file"]: file["reason"] for file in bad_files},
        "bad_files_bytes_read": sum(file["bytes_read"] for file in bad_files),
        "bad_files_bytes_lost": sum(file["bytes_lost"] for file in bad_files),
        "bad_records": bad.total(),
        "bad_records_by_reason": dict(sorted(bad.items())),
        **drops,
        "documents": written["train documents"] + written["heldout documents"],
        "heldout_documents": written["heldout documents"],
        "bytes": num_bytes,
        "tokenizer": tokenizer.files[0],
        "end_token": tokenizer.decode([options.special_ids(tokenizer).end]),
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
    of_text = ("bytes_read", "bytes", "tokens_per_byte", "megabytes_per_second_per_worker")
    return {name: value for name, value in report.items() if options.files or name not in of_text}


def _write_manifest(options: JobOptions, tokenizer: AnyTokenizer) -> None:
    """Write OUTPUT/manifest.json from the tasks' receipts."""
    receipts = options.job.read_all("receipts")
    assert len(receipts) == options.num_tasks
    shards = {split: [shard for receipt in receipts for shard in receipt[split]] for split in ("train", "heldout")}
    splits = Splits(**shards)
    if not splits.train:
        raise InputError("the input gave no training rows: it is empty, or every document was held out or refused")
    options.job.remove_leftovers()
    manifest = Manifest(
        sequence_length=options.sequence_length,
        vocab_size=tokenizer.vocab_size,
        dtype=f"{row_dtype(tokenizer.vocab_size).name} little endian",
        packing=options.packing,
        tokenizer_sha256=tokenizer.sha256,
        special_ids=options.special_ids(tokenizer) if isinstance(tokenizer, JsonTokenizer) else None,
        total_rows=splits.total_rows,
        splits=splits,
    )
    write_text(f"{options.output}/{MANIFEST_NAME}", manifest.to_json())
