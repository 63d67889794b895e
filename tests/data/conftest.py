"""Small real shards for the tests of the data."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from gmlp_scale.data.loader import DataConfig, Loader
from gmlp_scale.data.shards import Manifest, ShardWriter, Splits, write_file

settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")

VOCAB_SIZE = 1000


def random_rows(num_rows: int, sequence_length: int, seed: int = 0) -> np.ndarray:
    """Rows that begin with <cls>, hold a few <sep>, and name their own number in their second and third token."""
    rows = np.random.default_rng(seed).integers(5, VOCAB_SIZE, (num_rows, sequence_length)).astype("<u2")
    rows[:, 0] = 2
    rows[:, -1] = 3
    return rows


@pytest.fixture
def write_shards(tmp_path):
    """write_shards([rows of each train shard], [rows of each held-out shard]) -> (folder, all train rows)."""

    def write(train: list[int], heldout: list[int] = (), *, sequence_length: int = 16, folder: Path | None = None):
        folder = folder or tmp_path / "shards"
        splits, rows = {}, {}
        for split, sizes in (("train", train), ("heldout", heldout)):
            shards = []
            rows[split] = random_rows(sum(sizes), sequence_length, seed=len(split))
            starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
            for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
                writer = ShardWriter(
                    folder, split, f"{split}-{number:05d}", sequence_length=sequence_length, rows_per_shard=10**4
                )
                writer.add(rows[split][start : start + size])
                shards += writer.close()
            splits[split] = tuple(shards)
        manifest = Manifest(
            sequence_length=sequence_length,
            vocab_size=VOCAB_SIZE,
            packing="packed",
            tokenizer_sha256="0" * 64,
            total_rows={"train": sum(train), "heldout": sum(heldout)},
            splits=Splits(**splits),
        )
        write_file(f"{folder}/manifest.json", manifest.to_json().encode())
        return folder, rows

    return write


@pytest.fixture
def make_loader(tmp_path):
    """make_loader(folder, data fields..., loader fields...) -> Loader, closed at the test's end."""
    loaders = []

    def make(folder, *, data=None, **fields):
        settings = {
            "sequence_length": 16, "vocab_size": VOCAB_SIZE, "seed": 0, "global_batch_size": 8, "micro_batch_size": 2,
            "rank": 0, "world_size": 1, "run_dir": tmp_path / "run",
        }  # fmt: skip
        loader = Loader(DataConfig(shards=str(folder), **(data or {})), **(settings | fields))
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()
