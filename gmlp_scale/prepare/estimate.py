"""An estimate of what a tokenizing job would write and how long it would take, from a sample of its input."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import BadRecord, Record, records_before_fault
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.read_documents import hub_records
from gmlp_scale.prepare.write_shards import PACKINGS

_MAX_FILES = 8
_SAMPLE_BYTES_PER_FILE = 500_000


class _Sample:
    """What the beginnings of a few files hold."""

    def __init__(self, options: JobOptions, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._packing = PACKINGS[options.packing](options.sequence_length)
        self.num_documents = self.num_bad_records = 0
        self.num_bytes = self.num_tokens = 0
        self.num_rows = 0.0
        self.bad_files: list[dict] = []

    def take(self, records: Iterable[Record | BadRecord]) -> bool:
        """Count records until they have enough text. Returns whether they ended before."""
        most_bytes = self.num_bytes + _SAMPLE_BYTES_PER_FILE
        for record in records:
            if not isinstance(record, Record):
                self.num_bad_records += 1
                continue
            num_tokens = len(self._tokenizer.encode(record.text))
            self.num_documents += 1
            self.num_bytes += len(record.text.encode())
            self.num_tokens += num_tokens + 1
            self.num_rows += self._packing.rows_filled(num_tokens)
            if self.num_bytes >= most_bytes:
                return False
        return True


def estimate(options: JobOptions, tokenizer: Tokenizer) -> dict[str, int | float | str]:
    """Reads and tokenizes the beginnings of a few files, or of a few parts of a data set of the hub."""
    started = time.perf_counter()
    sample = _Sample(options, tokenizer)
    scale = (_sample_hub if options.hub_data_set else _sample_files)(sample, options)
    seconds = time.perf_counter() - started
    found = {
        "sampled_documents": sample.num_documents,
        "sampled_bad_files": len(sample.bad_files),
        "sampled_bad_records": sample.num_bad_records,
        "sampled_tokens_per_byte": round(sample.num_tokens / max(1, sample.num_bytes), 4),
    }
    if scale is None:
        return found | {"estimated_documents": "unknown, for the data set does not say its size"}
    documents, rows = round(scale * sample.num_documents), round(scale * sample.num_rows)
    return found | {
        "estimated_documents": documents,
        "estimated_bytes": round(scale * sample.num_bytes),
        "estimated_tokens": round(scale * sample.num_tokens),
        "estimated_rows": rows,
        "estimated_shards": _num_shards(options, documents, rows),
        "estimated_output_bytes": rows * options.sequence_length * ROW_DTYPE.itemsize,
        "estimated_hours": round(scale * seconds / options.workers / 3600, 3),
    }


def _num_shards(options: JobOptions, documents: int, rows: int) -> int:
    """Each task writes shards of its own for each split that it has a document of."""
    num_shards = 0
    for share in (1 - options.heldout_fraction, options.heldout_fraction):
        tasks = min(options.num_tasks, round(share * documents))
        if tasks:
            num_shards += tasks * math.ceil(share * rows / tasks / options.rows_per_shard)
    return num_shards


def _sample_files(sample: _Sample, options: JobOptions) -> float:
    """Returns how many times the sample the whole input is."""
    num_stored_bytes = 0
    for file in _spread(options.files):
        reader = options.reader(file)
        records = records_before_fault(reader, sample.bad_files, options.max_bad_files)
        num_stored_bytes += file.num_bytes if sample.take(records) else reader.bytes_read
    return sum(file.num_bytes for file in options.files) / max(1, num_stored_bytes)


def _sample_hub(sample: _Sample, options: JobOptions) -> float | None:
    """As _sample_files; None unless every part was read to its end or the data set's card has its number of rows."""
    data_set, is_whole = options.hub_stream(), True
    parts = range(data_set.num_shards)
    for part in _spread(parts):
        is_whole &= sample.take(_hub_part(options, part, len(parts)))
    if is_whole and len(parts) == len(_spread(parts)):
        return 1.0
    split = (data_set.info.splits or {}).get(options.hub_data_set[2])
    if split is None or not split.num_examples:
        return None
    return split.num_examples / max(1, sample.num_documents + sample.num_bad_records)


def _hub_part(options: JobOptions, part: int, num_parts: int) -> Iterator[Record | BadRecord]:
    for _, record, _ in hub_records(options, part, num_parts):
        if isinstance(record, BadRecord) and record.reason != "empty text":
            raise InputError(f"--text-field is {options.text_field!r}; the data set has {record.excerpt}")
        yield record


def _spread(parts: Sequence) -> Sequence:
    """At most _MAX_FILES of the parts, from the first to the last."""
    return parts[:: max(1, len(parts) // _MAX_FILES)][:_MAX_FILES]
