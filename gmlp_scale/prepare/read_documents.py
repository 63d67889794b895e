"""The first step of a task: it reads documents, from files or from a data set of the Hugging Face hub."""

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator

from datatrove.data import Document
from loguru import logger

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import InputFile
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.read_records import BadRecord, Record, records_before_fault
from gmlp_scale.storage.damage import damage_as
from gmlp_scale.storage.files import redacted, write_text

_MOST_QUARANTINED = 10_000  # bad records that a task keeps; it counts all
_CHECK_AFTER_RECORDS = 10_000
_PROGRESS_EVERY_SECONDS = 2.0
_HUB_ROWS_AT_A_TIME = 1000


def inputs_of_task(files: list[InputFile], rank: int, num_tasks: int) -> list[tuple[InputFile, int, int]]:
    """(file, part, number of parts) for each file that a task reads: every num_tasks-th file, or a part of one file."""
    if num_tasks <= len(files):
        return [(file, 0, 1) for file in files[rank::num_tasks]]
    index = rank % len(files)
    return [(files[index], rank // len(files), (num_tasks - 1 - index) // len(files) + 1)]


def stored_bytes_of_task(options: JobOptions, rank: int, num_tasks: int) -> int:
    """The stored bytes that a task reads; 0 for a data set of the hub. Each part of a file reads the whole file."""
    files = options.files
    return sum(file.num_bytes for file, _, _ in inputs_of_task(files, rank, num_tasks)) if files else 0


def read_documents(options: JobOptions, name_of_pass: str, data: None, rank: int, num_tasks: int) -> Iterator[Document]:
    """Yields the documents of a task's input. Counts what cannot be read and puts it into quarantine.

    A broken file gives the documents before its fault. Raises InputError where a task meets more broken files or bad
    records than are allowed.
    """
    job = options.job
    counts, quarantine, bad_files = Counter(), [], []
    last_report = time.monotonic()

    def report(bytes_read: int) -> None:
        progress = {"documents": counts["documents"], "bytes": counts["bytes"], "bytes_read": bytes_read}
        job.write(f"progress-{name_of_pass}/{rank:05d}.json", progress)

    _redact_task_log()
    for source, record, bytes_read in records_of_task(options, rank, num_tasks, bad_files):
        if isinstance(record, Record):
            counts["documents"] += 1
            counts["bytes"] += len(record.text.encode())
            yield Document(text=record.text, id=f"{source}:{record.line}")
        else:
            counts[f"bad: {record.reason}"] += 1
            if len(quarantine) < _MOST_QUARANTINED:
                quarantine.append({"file": source, **vars(record)})
            if counts["documents"] + bad_records(counts).total() >= _CHECK_AFTER_RECORDS:
                first = quarantine[0]
                where = f"the first is {first['file']}, line {first['line']}: {first['reason']}"
                check_bad_records(options, counts, where)
        if time.monotonic() - last_report > _PROGRESS_EVERY_SECONDS:
            report(bytes_read)
            last_report = time.monotonic()
    if quarantine:
        lines = "".join(json.dumps(entry) + "\n" for entry in quarantine)
        write_text(f"{job.url}/quarantine/{rank:05d}.jsonl", lines)
    job.write(f"bad_files/{rank:05d}.json", bad_files)
    job.write(f"counts/read-{rank:05d}.json", counts)
    report(stored_bytes_of_task(options, rank, num_tasks))


def records_of_task(
    options: JobOptions, rank: int, num_tasks: int, bad_files: list[dict]
) -> Iterator[tuple[str, Record | BadRecord, int]]:
    """(file or data set, record, stored bytes that the task has read). A record without text is a bad one.

    Adds broken files to `bad_files`.
    """
    if options.hub_data_set:
        yield from _hub_records(options, rank, num_tasks)
        return
    bytes_before = 0
    for file, part, num_parts in inputs_of_task(options.files, rank, num_tasks):
        url, reader = redacted(file.url), options.reader(file, part, num_parts)
        for record in records_before_fault(reader, bad_files, options.max_bad_files):
            if isinstance(record, Record) and (not record.text or record.text.isspace()):
                record = BadRecord(record.line, "empty text", "")
            yield url, record, bytes_before + reader.bytes_read
        bytes_before += file.num_bytes


def _hub_records(options: JobOptions, rank: int, num_tasks: int) -> Iterator[tuple[str, Record | BadRecord, int]]:
    """(data set, record, 0): every num_tasks-th file of the data set or, where it is one file, such rows of it.

    A BadRecord's excerpt lists the row's columns.
    """
    from datasets.distributed import split_dataset_by_node

    data_set, field = options.hub_stream(), options.text_field
    if data_set.num_shards == 1:
        data_set = split_dataset_by_node(data_set, rank, num_tasks)
    elif rank < data_set.num_shards:
        data_set = data_set.shard(num_tasks, rank, contiguous=False)
    else:
        return
    line = 0
    with damage_as(lambda reason: InputError(f"--input {options.input[0]} cannot be read after {line} rows: {reason}")):
        for rows in data_set.iter(_HUB_ROWS_AT_A_TIME):
            for text in rows.get(field) or [None] * len(next(iter(rows.values()))):
                line += 1
                if isinstance(text, str) and not text.isspace() and text:
                    record = Record(text, line)
                else:
                    reason = "empty text" if isinstance(text, str) else f"no text in field {field!r}"
                    record = BadRecord(line, reason, ", ".join(rows))
                yield options.input[0], record, 0


def _redact_task_log() -> None:
    """Take the passwords and signatures of URLs out of the log that datatrove writes for each task.

    loguru would also print the values of variables below a traceback.
    """

    def patch(record: dict) -> None:
        if error := record["exception"]:
            record["message"] += "\n" + "".join(traceback.format_exception(error.value))
            record["exception"] = None
        record["message"] = redacted(record["message"])

    logger.configure(patcher=patch)


def check_bad_records(options: JobOptions, counts: Counter, where: str) -> None:
    """Raise InputError where more records are bad than allowed. `where`: the end of its message."""
    bad = bad_records(counts)
    num_records = counts["documents"] + bad.total()
    if bad.total() > options.max_bad_fraction * num_records:
        reasons = ", ".join(f"{count} {reason}" for reason, count in bad.most_common())
        raise InputError(
            f"{bad.total()} of {num_records} records are bad ({reasons}), more than --max-bad-fraction "
            f"{options.max_bad_fraction}; {where}"
        )


def bad_records(counts: Counter) -> Counter:
    """The number of bad records by reason."""
    return Counter({name.removeprefix("bad: "): counts[name] for name in counts if name.startswith("bad: ")})
