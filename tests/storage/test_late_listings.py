"""A store that lists new files late: what is there is read, kept and held all the same."""

import fsspec
import pytest

from gmlp_scale.checkpoint.stores import RemoteCheckpoints
from gmlp_scale.data.manifest import ShardFiles
from gmlp_scale.data.shards import Manifest
from gmlp_scale.storage.claim import hold_folder
from gmlp_scale.storage.files import download_file, list_files, read_file, write_file
from gmlp_scale.storage.run_folder import RemoteFolder
from tests.checkpoint.fake_engine import FakeEngine, alone, assert_holds

URL = "memory://late"


@pytest.fixture
def late(monkeypatch):
    """late(part): from now on no listing has files with `part` in their paths; late("") ends it."""
    store = type(fsspec.filesystem("memory"))
    listings, hidden = (store.ls, store.find), []

    def without_hidden(listing):
        def listed(*arguments, **options):
            found = listing(*arguments, **options)
            names = [entry if isinstance(entry, str) else entry["name"] for entry in found]
            return [e for e, name in zip(found, names, strict=True) if not any(part in name for part in hidden)]

        return listed

    for name, listing in zip(("ls", "find"), listings, strict=True):
        monkeypatch.setattr(store, name, without_hidden(listing))
    yield lambda part: hidden.__setitem__(slice(None), [part] if part else [])
    hidden.clear()
    fsspec.filesystem("memory").rm("/late", recursive=True)


def save(folder, *steps: int):
    """A run that resumes and saves these steps; the checkpoint that it resumed from."""
    checkpointer = alone(RemoteCheckpoints(f"{URL}/checkpoints", folder))
    checkpoint = checkpointer.newest()
    if checkpoint:
        assert_holds(checkpoint, seed=checkpoint.step)
    for step in steps:
        checkpointer.save(FakeEngine(seed=step), step)
    checkpointer.wait()
    return checkpoint


def test_a_checkpoint_whose_done_is_not_listed_yet_is_taken_and_not_deleted(late, tmp_path, trials):
    save(tmp_path / "first", 1, 2)
    late("step_000000002/DONE")
    assert save(tmp_path / "second").step == 2
    trials("a store that lists new files late", 1)


def test_a_checkpoint_that_is_not_listed_at_all_is_written_again(late, tmp_path, trials):
    save(tmp_path / "first", 1, 2)
    late("step_000000002")
    assert save(tmp_path / "second", 2, 3).step == 1
    late("")
    assert save(tmp_path / "third").step == 3
    assert_holds(RemoteCheckpoints(f"{URL}/checkpoints", tmp_path / "copies").open("step_000000002"), seed=2)
    trials("a store that lists new files late", 1)


def test_a_claim_that_is_not_listed_yet_holds_and_one_that_ended_blocks_nobody(late, trials):
    late("000001.json")
    with hold_folder("OUTPUT", f"{URL}/claims") as is_held:
        assert is_held(), "before, the holder took its own claim for another's"
    with hold_folder("OUTPUT", f"{URL}/claims") as is_held:
        assert is_held() and read_file(f"{URL}/claims/000002.json")
    trials("a store that lists new files late", 2)


def test_shards_are_never_listed(late, forty_rows, tmp_path, trials):
    for path in forty_rows.rglob("*"):
        if path.is_file():
            write_file(f"{URL}/shards/{path.relative_to(forty_rows)}", path.read_bytes())
    late("late")
    assert list_files(f"{URL}/shards") == []
    manifest = Manifest.load(f"{URL}/shards")
    files = ShardFiles(f"{URL}/shards", tmp_path / "cache")
    for shard in manifest.splits.train:
        assert files.local_path(shard).stat().st_size == shard.bytes
    trials("a store that lists new files late", 1)


def test_every_host_of_a_run_at_a_url_begins_with_its_record_of_corrupt_shards(late, tmp_path):
    write_file(f"{URL}/run/corrupt_shards.jsonl", b"record\n")
    write_file(f"{URL}/run/checkpoints/step_000000001/DONE", b"not copied")
    with RemoteFolder(f"{URL}/run", tmp_path / "other_host").local_folder():
        assert (tmp_path / "other_host" / "corrupt_shards.jsonl").read_bytes() == b"record\n"
        assert [path.name for path in (tmp_path / "other_host").iterdir()] == ["corrupt_shards.jsonl"]


def test_a_file_that_came_after_a_listing_is_copied(s3, tmp_path, trials):
    """s3fs keeps listings, and takes a file that they lack for absent."""
    s3.put_object(Bucket="bucket", Key="run/first", Body=b"1")
    assert list_files("s3://bucket/run") == ["first"]
    s3.put_object(Bucket="bucket", Key="run/late", Body=b"22")
    download_file("s3://bucket/run/late", tmp_path / "late")
    assert (tmp_path / "late").read_bytes() == b"22"
    trials("a store that lists new files late", 1)
