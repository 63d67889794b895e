"""What a tokenizing job would give and take, from a sample of its input."""

import time

from data_prep.input_files import FileReader, InputFile, Record
from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.tokenizer import Tokenizer

_MAX_FILES = 8
_SAMPLE_BYTES_PER_FILE = 500_000


def estimate(
    files: list[InputFile], tokenizer: Tokenizer, *, sequence_length: int, shard_bytes: int, workers: int, **reading
) -> dict[str, int | float]:
    """Reads and tokenizes the beginnings of a few files; `reading` is what FileReader takes."""
    started = time.perf_counter()
    num_documents = num_bad = num_bytes = num_tokens = 0
    num_stored_bytes = 0
    for file in files[:: max(1, len(files) // _MAX_FILES)][:_MAX_FILES]:
        reader = FileReader(file, **reading)
        file_bytes = stored_bytes = 0
        for record in reader:
            stored_bytes = reader.bytes_read  # which is not known once the file is closed
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
    rows = round(scale * num_tokens / (sequence_length - 1))
    output_bytes = rows * sequence_length * ROW_DTYPE.itemsize
    return {
        "sampled_documents": num_documents,
        "sampled_bad_records": num_bad,
        "sampled_tokens_per_byte": round(num_tokens / max(1, num_bytes), 4),
        "estimated_documents": round(scale * num_documents),
        "estimated_bytes": round(scale * num_bytes),
        "estimated_tokens": round(scale * num_tokens),
        "estimated_rows": rows,
        "estimated_shards": -(-output_bytes // shard_bytes),
        "estimated_output_bytes": output_bytes,
        "estimated_hours": round(scale * seconds / workers / 3600, 3),
    }
