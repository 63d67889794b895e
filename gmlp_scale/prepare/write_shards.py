"""The last step of a task: it tokenizes documents, packs them into rows and writes the rows as shards."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import xxhash
from datatrove.data import Document

from gmlp_scale.data.batch import OUR_SPECIAL_IDS, SpecialIds
from gmlp_scale.data.json_tokenizer import AnyTokenizer, open_tokenizer
from gmlp_scale.data.shards import ROW_DTYPE, ShardWriter, row_dtype
from gmlp_scale.prepare.job import JobOptions

_BATCH_CHARACTERS = 1_000_000


class PackedRows:
    """Rows `<cls> document <sep> document <sep> ...`: the documents are one stream of tokens, cut every N - 1 tokens.
    Each row begins with <cls>; only the last row is padded.

    A vocabulary without <cls> has rows of N tokens of the stream. <sep> is its end token, which also pads a row where
    there is no <pad>.
    """

    def __init__(self, sequence_length: int, special: SpecialIds = OUR_SPECIAL_IDS, dtype: np.dtype = ROW_DTYPE):
        filler = special.end if special.pad is None else special.pad
        self._first = np.array([] if special.cls is None else [special.cls], dtype)
        self._end, self._filler = np.array([special.end], dtype), np.array([filler], dtype)
        self._row_tokens = sequence_length - len(self._first)
        self._waiting = [self._end[:0]]

    def rows_filled(self, num_tokens: int) -> float:
        """How many rows a document of so many tokens fills."""
        return (num_tokens + 1) / self._row_tokens

    def add(self, ids: np.ndarray) -> None:
        self._waiting += [ids.astype(self._end.dtype), self._end]

    def take(self) -> np.ndarray:
        """The rows that are full, uint16 or uint32 [R, N]."""
        stream = np.concatenate(self._waiting)
        num_rows = len(stream) // self._row_tokens
        rows, rest = np.split(stream, [num_rows * self._row_tokens])
        self._waiting = [rest]
        firsts = np.tile(self._first, (num_rows, 1))
        return np.concatenate([firsts, rows.reshape(num_rows, self._row_tokens)], axis=1)

    def take_last(self) -> np.ndarray:
        """The full rows and what is left as one padded row, uint16 or uint32 [R, N]."""
        num_waiting = sum(map(len, self._waiting))
        self._waiting.append(np.repeat(self._filler, -num_waiting % self._row_tokens))
        return self.take()


class DocumentRows(PackedRows):
    """Rows `<cls> document <sep> <pad>...`: each row holds one document, or a part of a document that is too long."""

    def rows_filled(self, num_tokens: int) -> float:
        return -(-num_tokens // (self._row_tokens - 1))

    def add(self, ids: np.ndarray) -> None:
        longest = self._row_tokens - 1
        for start in range(0, len(ids), longest):
            part = ids[start : start + longest]
            super().add(part)
            self._waiting.append(np.repeat(self._filler, longest - len(part)))


PACKINGS = {"packed": PackedRows, "document": DocumentRows}


class SplitOutput:
    """The rows and shards that a task writes for one split. Adds to the task's `counts`."""

    def __init__(self, options: JobOptions, tokenizer: AnyTokenizer, split: str, rank: int, counts: Counter):
        length, vocab_size = options.sequence_length, tokenizer.vocab_size
        self._special = options.special_ids(tokenizer)
        self.rows = PACKINGS[options.packing](length, self._special, row_dtype(vocab_size))
        rows_per_shard = options.rows_per_shard(vocab_size)
        stem = f"{split}-{rank:05d}"
        self._writer = ShardWriter(options.output, split, stem, sequence_length=length, rows_per_shard=rows_per_shard)
        self._split = split
        self._counts = counts

    def write(self, rows: np.ndarray) -> None:
        self._counts[f"{self._split} rows"] += len(rows)
        self._counts["padding tokens"] += int(self._special.is_filler(rows).sum())
        self._writer.add(rows)

    def close(self) -> list[dict]:
        self.write(self.rows.take_last())
        return [shard.model_dump() for shard in self._writer.close()]


def write_shards(options: JobOptions, data: Iterable[Document], rank: int, num_tasks: int) -> None:
    """Tokenizes, packs and writes a task's documents."""
    tokenizer = open_tokenizer(options.tokenizer)
    write_rows(options, tokenizer, _batches(data), tokenizer.encode_batch, rank)


def write_rows(
    options: JobOptions,
    tokenizer: AnyTokenizer,
    batches: Iterable[list[str] | list[np.ndarray]],
    encode: Callable[[list], list[np.ndarray]],
    rank: int,
) -> None:
    """Encodes, packs and writes a task's documents. The receipt, written last, lists the task's shards."""
    counts, last_lap = Counter(), time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal last_lap
        now = time.perf_counter()
        counts[f"{stage} seconds"] += now - last_lap
        last_lap = now

    outputs = {split: SplitOutput(options, tokenizer, split, rank, counts) for split in ("train", "heldout")}
    for documents in batches:
        lap("reading")
        encoded = encode(documents)
        lap("tokenizing")
        for document, ids in zip(documents, encoded, strict=True):
            content = document.encode() if isinstance(document, str) else document.tobytes()
            split = "heldout" if is_heldout(content, options.heldout_fraction) else "train"
            outputs[split].rows.add(ids)
            counts[f"{split} documents"] += 1
            counts["bytes"] += len(content)
        for output in outputs.values():
            output.write(output.rows.take())
        ids = np.concatenate(encoded)
        counts["tokens"] += len(ids)
        counts["unknown tokens"] += int(np.isin(ids, tokenizer.unknown_ids).sum())
        counts["byte tokens"] += int(np.isin(ids, tokenizer.byte_ids).sum())
        lap("writing")
    receipt = {split: output.close() for split, output in outputs.items()}
    lap("writing")
    options.job.write(f"counts/write-{rank:05d}.json", counts)
    options.job.write(f"receipts/{rank:05d}.json", receipt)


def is_heldout(content: bytes, fraction: float) -> bool:
    """Whether a document is held out. Its UTF-8 text, or its ids, alone decide, so equal ones get the same answer."""
    return xxhash.xxh3_64_intdigest(content) < fraction * 2**64


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    texts, num_characters = [], 0
    for document in documents:
        texts.append(document.text)
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield texts
            texts, num_characters = [], 0
    if texts:
        yield texts
