"""An estimate of what a tokenizing job would write and how long it would take, from a sample of its input."""

import time

from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.prepare.input_files import Record, records_before_fault
from gmlp_scale.prepare.job_options import JobOptions

_MAX_FILES = 8
_SAMPLE_BYTES_PER_FILE = 500_000


def estimate(options: JobOptions, tokenizer: Tokenizer) -> dict[str, int | float]:
    """Read and tokenize the beginnings of a few files. ValueError for a data set of the hub."""
    files = options.files
    if not files:
        raise ValueError("--dry-run needs files: a data set of the hub does not tell its size before it is read")
    bad_files = []
    started = time.perf_counter()
    num_documents = num_bad = num_bytes = num_tokens = num_stored_bytes = 0
    for file in files[:: max(1, len(files) // _MAX_FILES)][:_MAX_FILES]:
        reader = options.reader(file)
        file_bytes = stored_bytes = 0
        for record in records_before_fault(reader, bad_files, options.max_bad_files):
            stored_bytes = reader.bytes_read  # asked here, since it is 0 once the file is closed
            if not isinstance(record, Record):
                num_bad += 1
                continue
            num_documents += 1
            file_bytes += len(record.text.encode(errors="replace"))
            num_tokens += len(tokenizer.encode(record.text)) + 1
            if file_bytes >= _SAMPLE_BYTES_PER_FILE:
                break
        else:
            stored_bytes = file.num_bytes
        num_bytes += file_bytes
        num_stored_bytes += stored_bytes
    seconds = time.perf_counter() - started
    scale = sum(file.num_bytes for file in files) / max(1, num_stored_bytes)
    rows = round(scale * num_tokens / (options.sequence_length - 1))
    output_bytes = rows * options.sequence_length * ROW_DTYPE.itemsize
    return {
        "sampled_documents": num_documents,
        "sampled_bad_files": len(bad_files),
        "sampled_bad_records": num_bad,
        "sampled_tokens_per_byte": round(num_tokens / max(1, num_bytes), 4),
        "estimated_documents": round(scale * num_documents),
        "estimated_bytes": round(scale * num_bytes),
        "estimated_tokens": round(scale * num_tokens),
        "estimated_rows": rows,
        "estimated_shards": -(-output_bytes // options.shard_bytes),
        "estimated_output_bytes": output_bytes,
        "estimated_hours": round(scale * seconds / options.workers / 3600, 3),
    }
