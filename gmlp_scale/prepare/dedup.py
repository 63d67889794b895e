"""Dropping documents before they are tokenized: duplicates, near duplicates, and texts that an evaluation uses.

Deduplication is datatrove's, in passes over the whole input: the tasks write signatures, a few tasks find the
duplicates among all signatures, and a filter drops these documents in the next pass.
"""

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from gmlp_scale.data.hashing import hash64
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.job import JobFolder, JobOptions
from gmlp_scale.prepare.read_records import Record

_NGRAM_WORDS = 13


Step = PipelineStep | Callable[[Iterator[Document] | None, int, int], Iterator[Document] | None]
"""One of datatrove's, or a function of the documents of the step before, the task's number and the number of tasks."""


class Pass(NamedTuple):
    """A run of tasks."""

    name: str
    steps: list[Step]
    num_tasks: int
    reads_input: bool = True
    """Or what the pass before wrote."""


Readers = Callable[[str], list[Step]]  # the first steps of the pass with this name, which read and filter


def exact_passes(options: JobOptions, readers: Readers) -> tuple[list[Pass], PipelineStep]:
    """The passes that find documents with equal normalised text, and the filter that keeps one of each."""
    folder = f"{options.job.url}/dedup/exact"
    config = ExactDedupConfig(content_getter=normalized_text)
    signatures = ExactDedupSignature(f"{folder}/signatures", config)
    passes = [
        Pass("exact-signatures", [*readers("exact-signatures"), signatures], options.num_tasks),
        Pass("exact-find", [ExactFindDedups(f"{folder}/signatures", f"{folder}/duplicates", config)], 1, False),
    ]
    return passes, ExactDedupFilter(f"{folder}/duplicates", config)


def minhash_passes(options: JobOptions, readers: Readers) -> tuple[list[Pass], PipelineStep]:
    """The passes that find near duplicates by MinHash (14 buckets of 8 hashes of 5-grams of words), and the filter."""
    folder = f"{options.job.url}/dedup/minhash"
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))  # datatrove 0.10's xxhash fails with xxhash 4
    signatures = MinhashDedupSignature(f"{folder}/signatures", config, language=BlankWordTokenizer())
    buckets = MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)
    clusters = MinhashDedupCluster(f"{folder}/buckets", f"{folder}/remove", config)
    passes = [
        Pass("minhash-signatures", [*readers("minhash-signatures"), signatures], options.num_tasks),
        Pass("minhash-buckets", [buckets], config.num_buckets, False),
        Pass("minhash-clusters", [clusters], 1, False),
    ]
    return passes, MinhashDedupFilter(f"{folder}/remove")


DEDUPLICATIONS = {"exact": exact_passes, "minhash": minhash_passes}


def normalized_text(document: Document) -> bytes:
    """Lower case, with single blanks."""
    return " ".join(document.text.lower().split()).encode()


class BlankWordTokenizer(WordTokenizer):
    """Words are what stands between blanks. datatrove's own tokenizer for English needs spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    sent_tokenize = span_tokenize = None  # nobody asks for them


def drop_contaminated(options: JobOptions, data: Iterator[Document], rank: int, num_tasks: int) -> Iterator[Document]:
    """Drops documents that share 13 words in a row with a text of --decontaminate, such as the dev set of a task."""
    hashes = [np.empty(0, np.uint64)]
    for file in options.files_to_avoid:
        num_before = sum(map(len, hashes))
        for record in options.reader(file):
            if not isinstance(record, Record):
                raise InputError(f"--decontaminate {file.url}, line {record.line}: {record.reason}")
            lines = record.text.splitlines() if file.kind in ("text", "table") else [record.text]
            hashes += [_ngram_hashes(line) for line in lines]
        if sum(map(len, hashes)) == num_before:
            needed = f"a text of {_NGRAM_WORDS} words or more; in a text file each line is a text"
            raise InputError(f"--decontaminate {file.url} has nothing that a document could share; needed: {needed}")
    banned = np.unique(np.concatenate(hashes))
    for document in data:
        if not np.isin(_ngram_hashes(document.text), banned).any():
            yield document


def _ngram_hashes(text: str) -> np.ndarray:
    """Hashes of every 13 words in a row, case and punctuation aside; uint64."""
    words = np.array([_word_hash(word) for word in re.findall(r"\w+", text.lower())], np.uint64)
    if len(words) < _NGRAM_WORDS:
        return np.empty(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(words, _NGRAM_WORDS)
    return hash64(*windows.T)


@lru_cache(maxsize=1_000_000)
def _word_hash(word: str) -> int:
    return xxhash.xxh64_intdigest(word.encode())


def count_documents(
    job: JobFolder, name: str, data: Iterator[Document], rank: int, num_tasks: int
) -> Iterator[Document]:
    """Counts the documents that pass, under `name`."""
    num_documents = 0
    for document in data:
        num_documents += 1
        yield document
    job.write(f"counts/{name}-{rank:05d}.json", {"documents": num_documents})
