"""The cache of shards: how often it lists its folder, and that its total mends itself."""

import os

import pytest

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.manifest import read_verified
from gmlp_scale.data.shards import Manifest


@pytest.fixture
def twenty(write_shards):
    """A folder of 20 shards of equal size, and their entries in the manifest."""
    folder, _ = write_shards([10] * 20)
    return str(folder), Manifest.load(folder).splits.train


@pytest.fixture
def listings(monkeypatch):
    """Grows by one each time the cache lists a folder."""
    found, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: found.append(path) or scandir(path))
    return found


def cached_bytes(cache) -> int:
    return sum((cache / name).stat().st_size for name in os.listdir(cache) if name.endswith(".tar"))


def test_copies_are_counted_without_listing_the_folder(twenty, listings, tmp_path):
    folder, shards = twenty
    limit, cache = 10 * shards[0].bytes, tmp_path / "cache"
    files = ShardFiles(folder, str(cache), max_bytes=limit)
    for number, shard in enumerate(shards):
        files = files if number % 2 else ShardFiles(folder, str(cache), max_bytes=limit)  # as ranks take turns
        files.local_path(shard)
        assert cached_bytes(cache) <= limit
    assert len(listings) == 1 + 5  # when the cache is new, and once per tenth of the limit (one shard, and one to come)
    assert {path.stem for path in cache.glob("*.tar")} >= {shard.sha256 for shard in shards[-9:]}


@pytest.mark.parametrize("total", ["", "999999999999"], ids=["cut short", "too high"])
def test_a_wrong_total_mends_itself(total, twenty, listings, tmp_path):
    folder, shards = twenty
    cache = tmp_path / "cache"
    files = ShardFiles(folder, str(cache), max_bytes=10 * shards[0].bytes)
    for shard in shards[:4]:
        files.local_path(shard)
    (cache / "total_bytes").write_text(total)
    for shard in shards[4:10]:
        files.local_path(shard)
    assert int((cache / "total_bytes").read_text()) == cached_bytes(cache) == 10 * shards[0].bytes
    assert len(listings) == 2


def test_a_discarded_copy_counts_until_the_folder_is_listed(twenty, tmp_path):
    folder, shards = twenty
    cache = tmp_path / "cache"
    files = ShardFiles(folder, str(cache), max_bytes=4 * shards[0].bytes)
    for shard in shards[:3]:
        files.local_path(shard)
    files.local_path(shards[0]).write_bytes(b"went bad")
    files.opened(shards[0], lambda path: read_verified(path, shards[0]))
    files.local_path(shards[3])  # the total is five shards now, and the folder holds three
    assert cached_bytes(cache) == 4 * shards[0].bytes == int((cache / "total_bytes").read_text())
