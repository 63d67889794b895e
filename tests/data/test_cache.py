"""The cache of shards: what it evicts, how often it lists its folder, and that its total mends itself."""

import os
from pathlib import Path

import pytest

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.manifest import Shard, read_verified
from gmlp_scale.data.shards import Manifest, ShardRows
from tests.forked import fork


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


def test_the_cache_evicts_what_was_used_longest_ago(twenty, tmp_path):
    folder, shards = twenty
    cache = tmp_path / "cache"
    files = ShardFiles(folder, str(cache), max_bytes=3 * shards[0].bytes / 0.9)  # a tenth is freed at once
    opened = ShardRows(files.local_path(shards[0]), shards[0], 16)
    for age, shard in ((30, shards[1]), (20, shards[2])):
        path = files.local_path(shard)
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    files.local_path(shards[3])
    assert {path.stem for path in cache.glob("*.tar")} == {shards[i].sha256 for i in (0, 2, 3)}
    ShardFiles(folder, str(cache), max_bytes=1).local_path(shards[1])
    assert {path.stem for path in cache.glob("*.tar")} == {shards[1].sha256}
    assert len(opened.read([0, 1])) == 2  # an evicted shard that is open stays readable


def fetch_and_die(files: ShardFiles, shard: Shard) -> None:
    write = Path.write_bytes

    def write_half_and_die(path: Path, content: bytes):
        write(path, content[: len(content) // 2])
        os.kill(os.getpid(), 9)

    Path.write_bytes = write_half_and_die
    files.local_path(shard)


def test_a_rank_killed_while_it_fetches_leaves_nothing_that_is_read(twenty, tmp_path, trials):
    folder, (shard, *_) = twenty
    process = fork(fetch_and_die, ShardFiles(folder, str(tmp_path / "cache")), shard)
    process.join()
    assert process.exitcode == -9
    assert not list((tmp_path / "cache").glob("*.tar"))
    path = ShardFiles(folder, str(tmp_path / "cache")).local_path(shard)
    assert path.read_bytes() == (Path(folder) / shard.name).read_bytes()
    trials("SIGKILL of a random rank at a random step", 1)
