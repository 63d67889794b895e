"""An estimate of what a tokenizing job would write and how long it would take, from a sample of its input."""

import math
import time
from dataclasses import dataclass

from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import Record, records_before_fault
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.write_shards import PACKINGS, DocumentRows, PackedRows

_MAX_FILES = 8
_SAMPLE_BYTES_PER_FILE = 500_000


@dataclass
class _Sample:
    """What the beginnings of a few files hold."""

    tokenizer: Tokenizer
    packing: PackedRows | DocumentRows
    num_documents: int = 0
    num_bad_files: int = 0
    num_bad_records: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    num_rows: float = 0.0
    scale: float | None = None
    """How many times the sample the whole input is; None if that is unknown."""

    def add(self, text: str) -> int:
        """Counts a document. Returns its bytes."""
        num_bytes = len(text.encode(errors="replace"))
        self.num_documents += 1
        self.num_bytes += num_bytes
        num_tokens = len(self.tokenizer.encode(text))
        self.num_tokens += num_tokens + 1
        self.num_rows += self.packing.rows_filled(num_tokens)
        return num_bytes


def estimate(options: JobOptions, tokenizer: Tokenizer) -> dict[str, int | float | str]:
    """Reads and tokenizes the beginnings of a few files, or of a few parts of a data set of the hub."""
    started = time.perf_counter()
    sample = _Sample(tokenizer, PACKINGS[options.packing](options.sequence_length))
    (_sample_hub if options.hub_data_set else _sample_files)(sample, options)
    seconds = time.perf_counter() - started
    found = {
        "sampled_documents": sample.num_documents,
        "sampled_bad_files": sample.num_bad_files,
        "sampled_bad_records": sample.num_bad_records,
        "sampled_tokens_per_byte": round(sample.num_tokens / max(1, sample.num_bytes), 4),
    }
    if sample.scale is None:
        return found | {"estimated_documents": "unknown, for the data set does not tell its size"}
    documents, rows = round(sample.scale * sample.num_documents), round(sample.scale * sample.num_rows)
    return found | {
        "estimated_documents": documents,
        "estimated_bytes": round(sample.scale * sample.num_bytes),
        "estimated_tokens": round(sample.scale * sample.num_tokens),
        "estimated_rows": rows,
        "estimated_shards": _num_shards(options, documents, rows),
        "estimated_output_bytes": rows * options.sequence_length * ROW_DTYPE.itemsize,
        "estimated_hours": round(sample.scale * seconds / options.workers / 3600, 3),
    }


def _num_shards(options: JobOptions, documents: int, rows: int) -> int:
    """Each task writes shards of its own for each split that it has a document of."""
    num_shards = 0
    for share in (1 - options.heldout_fraction, options.heldout_fraction):
        tasks = min(options.num_tasks, round(share * documents))
        if tasks:
            num_shards += tasks * math.ceil(share * rows / tasks / options.rows_per_shard)
    return num_shards


def _sample_files(sample: _Sample, options: JobOptions) -> None:
    bad_files, num_stored_bytes = [], 0
    for file in options.files[:: max(1, len(options.files) // _MAX_FILES)][:_MAX_FILES]:
        reader = options.reader(file)
        file_bytes = stored_bytes = 0
        for record in records_before_fault(reader, bad_files, options.max_bad_files):
            stored_bytes = reader.bytes_read  # asked here, since it is 0 once the file is closed
            if not isinstance(record, Record):
                sample.num_bad_records += 1
                continue
            file_bytes += sample.add(record.text)
            if file_bytes >= _SAMPLE_BYTES_PER_FILE:
                break
        else:
            stored_bytes = file.num_bytes
        num_stored_bytes += stored_bytes
    sample.num_bad_files = len(bad_files)
    sample.scale = sum(file.num_bytes for file in options.files) / max(1, num_stored_bytes)


def _sample_hub(sample: _Sample, options: JobOptions) -> None:
    """The scale is known if every part was read to its end, or if the data set's card has the number of documents."""
    data_set, is_whole = options.hub_stream(), True
    indices = range(data_set.num_shards)
    indices_read = indices[:: max(1, len(indices) // _MAX_FILES)][:_MAX_FILES]
    for index in indices_read:
        part_bytes = 0
        for row in data_set.shard(len(indices), index):
            if options.text_field not in row:
                raise InputError(f"--text-field is {options.text_field!r}; the data set has {', '.join(row)}")
            if not (text := row[options.text_field]):
                sample.num_bad_records += 1
                continue
            part_bytes += sample.add(text)
            if part_bytes >= _SAMPLE_BYTES_PER_FILE:
                is_whole = False
                break
    split = (data_set.info.splits or {}).get(options.hub_data_set[2])
    if is_whole and len(indices_read) == len(indices):
        sample.scale = 1.0
    elif split is not None and split.num_examples:
        sample.scale = split.num_examples / max(1, sample.num_documents + sample.num_bad_records)
