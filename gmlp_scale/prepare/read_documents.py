"""The pipeline steps that read documents, from files or from a data set of the Hugging Face hub."""

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator

from datatrove.data import Document
from datatrove.pipeline.readers import HuggingFaceDatasetReader
from datatrove.pipeline.readers.base import BaseReader
from loguru import logger

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import BadRecord, InputFile, Record, records_before_fault
from gmlp_scale.prepare.job_folder import JobFolder
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.storage.files import redacted, write_text

_MOST_QUARANTINED = 10_000  # bad records that a task keeps; it counts all
_CHECK_AFTER_RECORDS = 10_000
_PROGRESS_EVERY_SECONDS = 2.0


def inputs_of_task(files: list[InputFile], rank: int, num_tasks: int) -> list[tuple[InputFile, int, int]]:
    """(file, part, number of parts) for each file that a task reads: every num_tasks-th file, or a part of one file."""
    if num_tasks <= len(files):
        return [(file, 0, 1) for file in files[rank::num_tasks]]
    index = rank % len(files)
    return [(files[index], rank // len(files), (num_tasks - 1 - index) // len(files) + 1)]


class ReadDocuments(BaseReader):
    """Yields the documents of a task's input files. Counts what cannot be read and puts it into quarantine.

    A broken file gives the documents before its fault. InputError where a task meets more of them than are allowed.
    """

    name = "Documents"

    def __init__(self, options: JobOptions, job: JobFolder, progress: str):
        super().__init__(text_key=options.text_field)
        self._options = options
        self._job = job
        self._progress = progress

    def run(self, data: None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        counts, quarantine, bad_files = Counter(), [], []
        bytes_before, last_report = 0, time.monotonic()
        redact_task_log()
        for file, part, num_parts in inputs_of_task(self._options.files, rank, world_size):
            url = redacted(file.url)
            reader = self._options.reader(file, part, num_parts)
            for record in records_before_fault(reader, bad_files, self._options.max_bad_files):
                problem = _problem(record)
                if problem is None:
                    counts["documents"] += 1
                    counts["bytes"] += len(record.text.encode())
                    yield Document(text=record.text, id=f"{url}:{record.line}")
                else:
                    counts[f"bad: {problem.reason}"] += 1
                    if len(quarantine) < _MOST_QUARANTINED:
                        quarantine.append({"file": url, **vars(problem)})
                    first = quarantine[0]
                    place = f"{first['file']}, line {first['line']}: {first['reason']}"
                    _check_bad_fraction(counts, self._options.max_bad_fraction, place)
                if time.monotonic() - last_report > _PROGRESS_EVERY_SECONDS:
                    self._report(rank, counts, bytes_before + reader.bytes_read)
                    last_report = time.monotonic()
            bytes_before += file.num_bytes
        if quarantine:
            lines = "".join(json.dumps(entry) + "\n" for entry in quarantine)
            write_text(f"{self._job.url}/quarantine/{rank:05d}.jsonl", lines)
        self._job.write(f"bad_files/{rank:05d}.json", bad_files)
        self._job.write(f"counts/read-{rank:05d}.json", counts)
        self._report(rank, counts, bytes_before)

    def _report(self, rank: int, counts: Counter, bytes_read: int) -> None:
        progress = {"documents": counts["documents"], "bytes": counts["bytes"], "bytes_read": bytes_read}
        self._job.write(f"{self._progress}/{rank:05d}.json", progress)


def redact_task_log() -> None:
    """Take the passwords and signatures of URLs out of the log that datatrove writes for each task.

    loguru would also print the values of variables below a traceback.
    """

    def patch(record: dict) -> None:
        if error := record["exception"]:
            record["message"] += "\n" + "".join(traceback.format_exception(error.value))
            record["exception"] = None
        record["message"] = redacted(record["message"])

    logger.configure(patcher=patch)


class ReadHubDataset(HuggingFaceDatasetReader):
    """Streams the documents of this task's share of a data set of the hub, by `datasets`, and counts them."""

    def __init__(self, options: JobOptions, job: JobFolder, progress: str):
        name, config, split = options.hub_data_set
        super().__init__(name, {"name": config, "split": split}, streaming=True, text_key=options.text_field)
        self._max_bad_fraction = options.max_bad_fraction
        self._job = job
        self._progress = progress
        self._counts = Counter()
        self._first_bad = ""

    def get_document_from_dict(self, data: dict, source_file: str, id_in_file: str) -> Document | None:
        reason = "empty text" if self.text_key in data else f"no text in field {self.text_key!r}"
        document = super().get_document_from_dict(data, source_file, id_in_file)
        if document is None:
            self._counts[f"bad: {reason}"] += 1
            self._first_bad = self._first_bad or f"{source_file} {id_in_file}: {reason}"
            _check_bad_fraction(self._counts, self._max_bad_fraction, self._first_bad)
        else:
            self._counts["documents"] += 1
            self._counts["bytes"] += len(document.text.encode())
        return document

    def run(self, data: None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        redact_task_log()
        last_report = time.monotonic()
        for document in super().run(data, rank, world_size):
            yield document
            if time.monotonic() - last_report > _PROGRESS_EVERY_SECONDS:
                self._job.write(f"{self._progress}/{rank:05d}.json", self._counts)
                last_report = time.monotonic()
        self._job.write(f"counts/read-{rank:05d}.json", self._counts)
        self._job.write(f"{self._progress}/{rank:05d}.json", self._counts)


def _check_bad_fraction(counts: Counter, allowed: float, first: str) -> None:
    """End a task early that has too many bad records. The whole job is checked at its end."""
    num_bad = num_bad_records(counts)
    num_records = counts["documents"] + num_bad
    if num_records >= _CHECK_AFTER_RECORDS and num_bad > allowed * num_records:
        raise InputError(
            f"{num_bad} of {num_records} records are bad, more than --max-bad-fraction {allowed}; the first is {first}"
        )


def num_bad_records(counts: Counter) -> int:
    return sum(count for name, count in counts.items() if name.startswith("bad: "))


def _problem(record: Record | BadRecord) -> BadRecord | None:
    if isinstance(record, BadRecord):
        return record
    if not record.text or record.text.isspace():
        return BadRecord(record.line, "empty text", "")
    try:
        record.text.encode()
    except UnicodeEncodeError:
        return BadRecord(record.line, "lone surrogate", record.text[:100].encode(errors="replace").decode())
    return None
