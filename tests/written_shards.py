"""Small real shards, written as data_prep writes them."""

import random
from pathlib import Path

import numpy as np

from gmlp_scale.data.manifest import Splits
from gmlp_scale.data.shards import Manifest, ShardWriter
from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.storage.files import write_text

VOCAB_SIZE = 1000


def random_rows(num_rows: int, sequence_length: int, seed: int = 0) -> np.ndarray:
    """uint16 rows of ordinary ids that begin with <cls> and end with <sep>."""
    rows = np.random.default_rng(seed).integers(5, VOCAB_SIZE, (num_rows, sequence_length)).astype("<u2")
    rows[:, 0] = 2
    rows[:, -1] = 3
    return rows


def write_tiny_shards(
    folder: Path, train: list[int], heldout: list[int] = (), *, sequence_length: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Writes shards of these numbers of rows and their manifest; returns the rows of each split."""
    splits, rows = {}, {}
    for split, sizes in (("train", train), ("heldout", heldout)):
        rows[split] = random_rows(sum(sizes), sequence_length, seed=seed + len(split))
        first_rows = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        splits[split] = ()
        for number, (first_row, size) in enumerate(zip(first_rows[:-1], sizes, strict=True)):
            stem = f"{split}-{number:05d}"
            writer = ShardWriter(folder, split, stem, sequence_length=sequence_length, rows_per_shard=10**4)
            writer.add(rows[split][first_row : first_row + size])
            splits[split] += tuple(writer.close())
    manifest = Manifest(
        sequence_length=sequence_length,
        vocab_size=VOCAB_SIZE,
        packing="packed",
        tokenizer_sha256="0" * 64,
        total_rows={"train": sum(train), "heldout": sum(heldout)},
        splits=Splits(**splits),
    )
    write_text(f"{folder}/manifest.json", manifest.to_json())
    return rows


def change_manifest(folder: Path, **fields) -> None:
    """Gives fields of the manifest other values, and seals it anew."""
    write_text(f"{folder}/manifest.json", Manifest.load(folder).model_copy(update=fields).to_json())


def add_tokenizer(shards: Path) -> None:
    """Trains one on random words and puts it beside the shards, as if they had been written with it."""
    letters = random.Random(0)
    texts = [" ".join("".join(letters.choices("abcdefghijklmnopqrst", k=5)) for _ in range(20)) for _ in range(300)]
    train_tokenizer(texts, VOCAB_SIZE, shards / "tokenizer")
    change_manifest(shards, tokenizer_sha256=Tokenizer(shards / "tokenizer").sha256)
