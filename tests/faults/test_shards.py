"""Damaged shards: what this project's reader and plain webdataset make of them."""

import random

import numpy as np
import pytest
import webdataset

from gmlp_scale.data.manifest import CorruptShardError
from gmlp_scale.data.shards import Manifest, ShardRows
from tests.damage import damaged
from tests.written_shards import write_tiny_shards

pytestmark = pytest.mark.faults
NUM_DAMAGES = 300


def _read_plainly(path) -> np.ndarray:
    return np.concatenate([sample["npy"] for sample in webdataset.WebDataset(str(path), shardshuffle=False).decode()])


def test_every_damage_of_a_shard_is_found(tmp_path, trials):
    rows = write_tiny_shards(tmp_path, [600], sequence_length=16)["train"]
    (shard,) = Manifest.load(tmp_path).splits.train
    path = tmp_path / shard.name
    good, draw, found, lost = path.read_bytes(), random.Random(0), 0, 0
    assert (_read_plainly(path) == rows).all()
    for _ in range(NUM_DAMAGES):
        path.write_bytes(damaged(draw, good, draw.randrange(len(good))))
        with pytest.raises(CorruptShardError):
            ShardRows(path, shard, 16)
        try:
            lost += not np.array_equal(_read_plainly(path), rows)
        except Exception:
            found += 1
    row = "a shard's bit flipped, byte zeroed, file cut or longer"
    trials(row, NUM_DAMAGES)
    trials(row, found + lost, lost, part="webdataset")
