"""Turns tokens that others have stored into shards: Megatron's .bin and .idx, nanoGPT's .bin, MosaicML's MDS.

python data_prep/convert_tokens.py --format megatron --input 'data/corpus_*.idx' --tokenizer TOKENIZER_DIR \\
    --sequence-length 1024 --output SHARDS_DIR
python data_prep/convert_tokens.py --format nanogpt --input 'fineweb10B/fineweb_train_*.bin' ...
python data_prep/convert_tokens.py --format mds --input data/c4/train ...

The rows hold the tokens in their order, with an end token behind the last one. All of the input is read once before
anything is written, so damaged input leaves nothing.
"""

import argparse
import glob
import sys
import time
from itertools import chain
from pathlib import Path

import xxhash

from gmlp_scale.data.json_tokenizer import open_tokenizer
from gmlp_scale.data.shards import row_dtype
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.job import JobOptions
from gmlp_scale.prepare.report import finish_job
from gmlp_scale.prepare.token_files import TOKEN_DTYPES, documents_of, read_pieces
from gmlp_scale.prepare.write_shards import write_rows
from gmlp_scale.storage.files import plain_place, redacted


class ConversionOptions(JobOptions):
    """Those of a job of one task, whose input are tokens."""

    files = ()


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--format", choices=("megatron", "nanogpt", "mds"), required=True, help="of the input")
    places = "globs of Megatron's .idx files, of .bin files, or of folders with index.json"
    add("--input", nargs="+", required=True, metavar="PATH", help=places)
    add("--tokenizer", required=True, metavar="TOKENIZER_DIR", help="the one that gave the tokens")
    add("--end-token", metavar="TOKEN", help="stands behind each document (default: the tokenizer's own)")
    add("--append-end-token", action="store_true", help="to documents of Megatron or samples of MDS that have none")
    add("--sequence-length", type=int, required=True, help="tokens in a row")
    add("--output", type=plain_place, required=True, metavar="SHARDS_DIR", help="a new folder, or that of the same job")
    add("--heldout-fraction", type=float, default=0.0, help=f"of the documents, chosen by their tokens {default}")
    add("--mds-column", default="tokens", help=f"holds the tokens of MDS {default}")
    add("--token-dtype", choices=TOKEN_DTYPES, help="of an MDS column of bytes (default: none)")
    add("--shard-bytes", type=int, default=JobOptions.shard_bytes, help=f"size of a shard {default}")
    given = vars(parser.parse_args())
    form, append = given.pop("format"), given.pop("append_end_token")
    reading = {"form": form, "mds_column": given.pop("mds_column"), "token_dtype": given.pop("token_dtype")}
    if form == "nanogpt" and append:
        raise InputError(f"--format {form} takes no --append-end-token")
    if form != "mds" and reading["token_dtype"]:
        raise InputError(f"--format {form} takes no --token-dtype")
    given["input"] = tuple(chain.from_iterable(map(matches, given["input"])))
    options, started = ConversionOptions(**given, tasks=1), time.monotonic()
    paths = [Path(place.removesuffix(".idx")) for place in options.input]
    tokenizer = open_tokenizer(options.tokenizer)
    vocab_size, end = tokenizer.vocab_size, options.special_ids(tokenizer).end
    ends = "added" if append else "needed" if form == "megatron" else "kept"

    def documents():
        pieces = chain.from_iterable(read_pieces(path, **reading, vocab_size=vocab_size) for path in paths)
        return documents_of(pieces, end, vocab_size, row_dtype(vocab_size), ends=ends)

    num_documents, checksum = 0, xxhash.xxh3_128()
    for some in documents():
        num_documents += len(some)
        for ids in some:
            checksum.update(ids)
    if not num_documents:
        raise InputError("--input holds no tokens; needed is one document at least")
    tokens = {"ends": ends, "tokens_xxh3_128": checksum.hexdigest()}
    with options.job.begun(options.settings(tokenizer) | reading | tokens):
        write_rows(options, tokenizer, filter(None, documents()), list, rank=0)
        options.job.write("counts/read-00000.json", {"documents": num_documents})
        finish_job(options, tokenizer)
    print(f"shards in {redacted(options.output)}, after {time.monotonic() - started:.1f} s")
    return 0


def matches(pattern: str) -> list[str]:
    """The paths that a glob of --input matches, by name."""
    if not (found := sorted(glob.glob(pattern))):
        raise InputError(f"--input {pattern} matches nothing here")
    return found


if __name__ == "__main__":
    sys.exit(main())
