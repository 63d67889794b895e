"""The manifest, of which no change goes unnoticed, and the cache of shards, whose total of bytes mends itself."""

import hashlib
import os
from pathlib import Path

import pytest

from gmlp_scale.data.manifest import Shard, ShardError, ShardFiles, Splits, read_verified
from gmlp_scale.data.shards import Manifest, ShardRows
from tests.forked import fork


def test_manifest_round_trip_and_mistakes(write_shards, tmp_path):
    folder, _ = write_shards([5, 6], [3])
    manifest = Manifest.load(folder)
    assert (manifest.num_rows("train"), manifest.num_rows("heldout")) == (11, 3)
    assert Manifest.load(f"file://{folder}").sha256 == manifest.sha256
    with pytest.raises(FileNotFoundError, match=r"no shards at .*data\.shards"):
        Manifest.load(tmp_path / "nowhere")

    path = folder / "manifest.json"
    with pytest.raises(ShardError, match=r"manifest\.json is a file: give the folder of the shards"):
        Manifest.load(path)
    text = path.read_text()
    for old, new, message in [
        ('"train": 11', '"train": 12', "the shards sum to"),
        ("train/train-00000", "../train-00000", "pattern"),
        ('"format_version": 1', '"format_version": 2', "format_version"),
        ('"packing"', '"pickling"', "pickling"),
        ("{", "", "not a valid manifest"),
    ]:
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ShardError, match=message):
            Manifest.load(folder)


def test_a_manifest_that_was_changed_is_refused_with_and_without_its_checksum(write_shards, caplog, trials):
    """One that is older and so has none is read with a warning. A run's data keep their fingerprint."""
    folder, _ = write_shards([5, 6, 7], [3])
    path = folder / "manifest.json"
    text, manifest = path.read_text(), Manifest.load(folder)
    assert not caplog.records
    one, two, three = manifest.splits.train
    (held,) = manifest.splits.heldout
    old = manifest.model_dump_json(indent=1) + "\n"
    path.write_text(old)
    assert Manifest.load(folder).sha256 == manifest.sha256 == hashlib.sha256(old.encode()).hexdigest()
    assert "has no checksum of its own" in caplog.text

    twin = two.model_copy(update={"sha256": one.sha256})
    for train, heldout, message in [
        ((one, two, two), (held,), "lists train/train-00001-000000.tar twice"),
        ((one, twin, three), (held,), "have the same checksum"),
        ((one, two), (held,), None),
        ((two, one, three), (held,), "out of the names' order"),
        ((one, two), (three,), "splits.heldout lists train/train-00002-000000.tar, a shard of another split"),
    ]:
        splits = Splits.model_construct(train=train, heldout=heldout)
        changed = manifest.model_copy(update={"splits": splits, "total_rows": splits.total_rows})
        seal = text[text.rindex(", ") :]
        path.write_text(changed.model_dump_json(indent=1)[:-1] + seal)
        with pytest.raises(ShardError, match=message or "its own checksum does not hold"):
            Manifest.load(folder)
        if message:
            path.write_text(changed.to_json())
            with pytest.raises(ShardError, match=message):
                Manifest.load(folder)
    path.write_text(text.replace("0" * 64, "1" * 64))
    with pytest.raises(ShardError, match=r"manifest\.json was damaged or changed .* its own checksum does not hold"):
        Manifest.load(folder)
    trials("shards missing, empty, of wrong count, listed twice or out of order", 5)


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
