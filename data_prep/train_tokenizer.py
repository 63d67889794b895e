"""Trains a tokenizer on a seeded sample of the input's documents.

python data_prep/train_tokenizer.py --input 'corpus/*.jsonl.gz' --vocab-size 32000 --output TOKENIZER_DIR

Reads the beginnings of all files, up to ten times the size of the sample, and keeps the documents with the smallest
seeded hashes. The same input, options and version of sentencepiece give the same tokenizer. A sample of the default
size takes about half a minute on two free cores.
"""

import argparse
import hashlib
import heapq
import json
import math
import os
import sys
import time
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS
from gmlp_scale.data.tokenizer import MODEL_NAME, NUM_BYTE_TOKENS, Tokenizer, train_tokenizer
from gmlp_scale.distributed.logs import command, progress_bar
from gmlp_scale.errors import InputError
from gmlp_scale.options import count, count_from_0, option
from gmlp_scale.prepare.input_files import find_inputs
from gmlp_scale.prepare.read_records import FileReader, Record, records_before_fault
from gmlp_scale.storage.claim import repeating
from gmlp_scale.storage.files import open_filesystem, read_file, redacted, with_retries, write_file, write_text

_DETAILS_NAME = "training.json"
_READ_PER_SAMPLED_BYTE = 10
_MAX_RECORD_BYTES = 4_000_000
_SMALLEST_VOCABULARY = NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS + 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--input", nargs="+", required=True, metavar="GLOB_OR_URL", help="files of documents")
    add(
        "--vocab-size",
        type=option(Annotated[int, Field(ge=_SMALLEST_VOCABULARY, le=1 << 16)]),
        default=32_000,
        help=f"pieces {default}",
    )
    add("--output", required=True, metavar="TOKENIZER_DIR", help="a new folder")
    add("--text-field", default="text", help=f"of each record {default}")
    add("--sample-bytes", type=count, default=20_000_000, help=f"of text to train on {default}")
    add("--seed", type=option(Annotated[int, Field(ge=0, lt=1 << 64)]), default=0, help=f"of the sample {default}")
    add("--max-bad-files", type=count_from_0, default=0, help=f"more broken files are an error {default}")
    return parser.parse_args()


@command
def main() -> int:
    options, started = parse_options(), time.monotonic()
    if _is_taken(options.output):
        raise InputError(f"--output {options.output} is there already: choose another, or delete it")
    texts = sample(options)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_cores = os.cpu_count() or 1
    seconds = training_seconds(num_bytes, options.vocab_size, num_cores)
    print(
        f"training on {len(texts):,} documents, {num_bytes:,} bytes: about {seconds:.0f} s if {num_cores} cores are "
        "free, longer if they are busy",
        flush=True,
    )
    bar = progress_bar(desc="training", bar_format=f"{{desc}}: {{elapsed_s:.0f}} of about {seconds:.0f} s")
    with TemporaryDirectory() as folder:
        with bar, repeating(bar.refresh, every_seconds=1.0):
            train_tokenizer(texts, options.vocab_size, folder)
        tokenizer, model = Tokenizer(folder), read_file(f"{folder}/{MODEL_NAME}")
    tokens_per_byte = sum(map(len, tokenizer.encode_batch(texts[:1000]))) / sum(len(t.encode()) for t in texts[:1000])
    details = vars(options) | {
        "sampled_documents": len(texts),
        "sampled_bytes": num_bytes,
        "tokens_per_byte": round(tokens_per_byte, 4),
        "sha256": tokenizer.sha256,
    }
    write_text(f"{options.output}/{_DETAILS_NAME}", json.dumps(redacted(details), indent=1) + "\n")
    write_file(f"{options.output}/{MODEL_NAME}", model)
    seconds = time.monotonic() - started
    print(f"{options.output}: {tokenizer.vocab_size} pieces, {tokens_per_byte:.4f} tokens per byte, {seconds:.0f} s")
    return 0


def _is_taken(output: str) -> bool:
    """Whether the folder has more than a killed start, or one on a full disk, leaves: the model is written last."""
    filesystem, path = open_filesystem(output)

    def look() -> bool:
        names = [found.rsplit("/", 1)[-1] for found in filesystem.ls(path, detail=False)]
        return not filesystem.isdir(path) or any(name != _DETAILS_NAME and name[0] != "." for name in names)

    try:
        return with_retries(look, f"looking into {output}")
    except FileNotFoundError:
        return False


def training_seconds(num_bytes: int, vocab_size: int, num_cores: int) -> float:
    """About how long sentencepiece will train if no other work takes the cores.

    It finds about a million pieces on one core. Then it drops a quarter of them in each round, on up to 16 cores, until
    the vocabulary is left. The two rates were fitted to the CPU seconds of 2.5, 5, 10, 20 and 40 MB of English text
    with 4,096, 8,192 and 32,000 pieces (sentencepiece 0.2.3, a server's x86 core), which they meet within 30 %.
    """
    halvings = math.log2(1e6 / vocab_size)
    return num_bytes / 1e6 * (0.4 + 0.23 * halvings / min(num_cores, 16))


def sample(options: argparse.Namespace) -> list[str]:
    """The documents with the smallest seeded hashes, about --sample-bytes in all, in the order of the hashes.

    Raises InputError where more files are found broken than allowed.
    """
    files, bad_files = find_inputs(options.input), []
    read_per_file = _READ_PER_SAMPLED_BYTE * options.sample_bytes / len(files)
    kept: list[tuple[int, str]] = []  # a heap with the largest hash, negated, on top
    kept_bytes = 0
    for file in progress_bar(files, desc="sampling", unit="file"):
        read_bytes = 0
        reader = FileReader(file, text_field=options.text_field, max_record_bytes=_MAX_RECORD_BYTES)
        for record in records_before_fault(reader, bad_files, options.max_bad_files):
            if not isinstance(record, Record):
                continue
            content = record.text.encode()
            digest = hashlib.blake2b(content, digest_size=8, key=options.seed.to_bytes(8)).digest()
            heapq.heappush(kept, (-int.from_bytes(digest), record.text))
            read_bytes += len(content)
            kept_bytes += len(content)
            while kept_bytes > options.sample_bytes:
                kept_bytes -= len(heapq.heappop(kept)[1].encode())
            if read_bytes >= read_per_file:
                break
    if not kept:
        raise InputError(f"--input holds no text in field {options.text_field!r}")
    return [text for _, text in sorted(kept, reverse=True)]


if __name__ == "__main__":
    sys.exit(main())
