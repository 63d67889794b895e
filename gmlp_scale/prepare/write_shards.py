"""The last step of a task: it tokenizes documents, packs them into rows and writes the rows as shards."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash
from datatrove.data import Document

from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, PAD_ID, SEP_ID, UNK_ID
from gmlp_scale.data.shards import ROW_DTYPE, ShardWriter
from gmlp_scale.data.tokenizer import NUM_BYTE_TOKENS, Tokenizer
from gmlp_scale.prepare.job import JobOptions

_BATCH_CHARACTERS = 1_000_000


class PackedRows:
    """Rows `<cls> document <sep> document <sep> ...`: the documents are one stream of tokens, cut every N - 1 tokens.
    Each row begins with <cls>; only the last row is padded."""

    def __init__(self, sequence_length: int):
        self._row_tokens = sequence_length - 1
        self._waiting: list[np.ndarray] = []

    def rows_filled(self, num_tokens: int) -> float:
        """How many rows a document of so many tokens fills."""
        return (num_tokens + 1) / self._row_tokens

    def add(self, ids: np.ndarray) -> None:
        self._waiting += [ids.astype(ROW_DTYPE), np.array([SEP_ID], ROW_DTYPE)]

    def take(self) -> np.ndarray:
        """The rows that are full, uint16 [R, N]."""
        stream = np.concatenate([np.empty(0, ROW_DTYPE), *self._waiting])
        num_rows = len(stream) // self._row_tokens
        rows, rest = np.split(stream, [num_rows * self._row_tokens])
        self._waiting = [rest]
        return np.insert(rows.reshape(num_rows, self._row_tokens), 0, CLS_ID, axis=1)

    def take_last(self) -> np.ndarray:
        """The full rows and what is left as one padded row, uint16 [R, N]."""
        num_waiting = sum(map(len, self._waiting))
        self._waiting.append(np.full(-num_waiting % self._row_tokens, PAD_ID, ROW_DTYPE))
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
            self._waiting.append(np.full(longest - len(part), PAD_ID, ROW_DTYPE))


PACKINGS = {"packed": PackedRows, "document": DocumentRows}


class SplitOutput:
    """The rows and shards that a task writes for one split. Adds to the task's `counts`."""

    def __init__(self, options: JobOptions, split: str, rank: int, counts: Counter):
        self.rows = PACKINGS[options.packing](options.sequence_length)
        stem = f"{split}-{rank:05d}"
        self._writer = ShardWriter(
            options.output, split, stem, sequence_length=options.sequence_length, rows_per_shard=options.rows_per_shard
        )
        self._split = split
        self._counts = counts

    def write(self, rows: np.ndarray) -> None:
        self._counts[f"{self._split} rows"] += len(rows)
        self._counts["padding tokens"] += int((rows == PAD_ID).sum())
        self._writer.add(rows)

    def close(self) -> list[dict]:
        self.write(self.rows.take_last())
        return [shard.model_dump() for shard in self._writer.close()]


def write_shards(options: JobOptions, data: Iterable[Document], rank: int, num_tasks: int) -> None:
    """Tokenizes, packs and writes a task's documents. The receipt, written last, lists the task's shards."""
    tokenizer = Tokenizer(options.tokenizer)
    counts, last_lap = Counter(), time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal last_lap
        now = time.perf_counter()
        counts[f"{stage} seconds"] += now - last_lap
        last_lap = now

    outputs = {split: SplitOutput(options, split, rank, counts) for split in ("train", "heldout")}
    for texts in _batches(data):
        lap("reading")
        encoded = tokenizer.encode_batch(texts)
        lap("tokenizing")
        for text, ids in zip(texts, encoded, strict=True):
            content = text.encode()
            split = "heldout" if is_heldout(content, options.heldout_fraction) else "train"
            outputs[split].rows.add(ids)
            counts[f"{split} documents"] += 1
            counts["bytes"] += len(content)
        for output in outputs.values():
            output.write(output.rows.take())
        ids = np.concatenate(encoded)
        is_byte = (ids >= NUM_SPECIAL_TOKENS) & (ids < NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS)
        counts["tokens"] += len(ids)
        counts["unknown tokens"] += int((ids == UNK_ID).sum())
        counts["byte tokens"] += int(is_byte.sum())
        lap("writing")
    receipt = {split: output.close() for split, output in outputs.items()}
    lap("writing")
    options.job.write(f"counts/write-{rank:05d}.json", counts)
    options.job.write(f"receipts/{rank:05d}.json", receipt)


def is_heldout(content: bytes, fraction: float) -> bool:
    """Whether a document is held out. Its UTF-8 text alone decides, so equal documents get the same answer."""
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
