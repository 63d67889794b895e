"""The manifest: what it lists, and that no change of it goes unnoticed."""

import hashlib

import pytest

from gmlp_scale.data.manifest import ShardError, Splits
from gmlp_scale.data.shards import Manifest


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
