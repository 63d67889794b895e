"""Files and URLs made to do harm: commands in URLs, files that unpack without end, JSON nested too deeply."""

import contextlib
import gzip
import json
import resource
import tarfile

import pytest
import zstandard

from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.data.manifest import ShardError, ShardFiles
from gmlp_scale.data.shards import Manifest
from gmlp_scale.prepare.input_files import InputFile, find_inputs
from gmlp_scale.prepare.read_records import BadRecord, FileReader
from gmlp_scale.storage.files import open_filesystem, read_file
from tests.checkpoint.fake_engine import save_steps
from tests.data_prep.corpora import make_texts, write_jsonl
from tests.gloo_ranks import run_ranks
from tests.written_shards import write_tiny_shards

pytestmark = pytest.mark.faults
DEEP = "[" * 10**5 + "]" * 10**5
BOMB_BYTES, MOST_GROWTH_BYTES = 4 << 30, 400 << 20
BOMBS = ["jsonl.gz", "txt.gz", "jsonl.zst", "txt.zst"]


def _run_pipe(canary) -> None:
    import webdataset

    with contextlib.suppress(tarfile.ReadError):
        list(webdataset.WebDataset(f"pipe:touch {canary}", shardshuffle=False, empty_check=False))


def test_a_pipe_url_runs_nothing(tmp_path, trials):
    canary = tmp_path / "canary"
    write_tiny_shards(tmp_path / "shards", [4], sequence_length=16)
    shard = Manifest.load(tmp_path / "shards").splits.train[0].model_copy(update={"name": f"pipe:touch {canary}"})
    url = f"pipe:touch {canary}"
    for read in (
        lambda: Manifest.load(url),
        lambda: read_file(url),
        lambda: open_filesystem(url)[0].cat_file(url),
        lambda: ShardFiles(url, str(tmp_path / "cache")).local_path(shard),
    ):
        with pytest.raises((OSError, ShardError)):
            read()
    with pytest.raises(ValueError, match="matches no file"):
        find_inputs([url])
    assert not canary.exists()
    trials("pipe: URLs", 5)
    run_ranks(_run_pipe, 1, canary)
    trials("pipe: URLs", 1, int(canary.exists()), part="webdataset")


def write_bomb(path) -> None:
    """A few MB, or KB, that unpack to BOMB_BYTES."""
    piece = bytes(1 << 24)
    compressed = gzip.compress(piece, 1) if ".gz" in path.name else zstandard.ZstdCompressor().compress(piece)
    path.write_bytes(compressed * (BOMB_BYTES // len(piece)))


def _read_bomb(path) -> tuple[int, str]:
    """By how many bytes this process grew, and what it found first."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = FileReader(InputFile(str(path), path.stat().st_size), text_field="text", max_record_bytes=1 << 20)
    found = [type(record).__name__ for record, _ in zip(reader, range(3), strict=False)]
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, "".join(found)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_unpacks_to_4_gb_takes_little_memory(kind, tmp_path, trials):
    path = tmp_path / f"bomb.{kind}"
    write_bomb(path)
    ((growth, found),) = run_ranks(_read_bomb, 1, path)
    assert growth < MOST_GROWTH_BYTES, f"{growth >> 20} MB"
    assert found in ("BadRecord", "", "RecordRecordRecord"), found
    trials("gz and zst that unpack to far more than memory", 1)


def test_json_nested_too_deeply_is_refused(tmp_path, trials):
    write_tiny_shards(tmp_path / "shards", [4], sequence_length=16)
    (tmp_path / "shards/manifest.json").write_text(DEEP)
    with pytest.raises(ShardError, match="recursion limit"):
        Manifest.load(tmp_path / "shards")
    save_steps(tmp_path / "checkpoints", [1, 2])
    (tmp_path / "checkpoints/step_000000002/DONE").write_text(DEEP)
    assert newest_checkpoint(tmp_path / "checkpoints")[0].step == 1
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(1))
    path.write_text(f'{{"text": {DEEP}}}\n' + json.dumps({"text": "good"}) + "\n")
    bad, good = FileReader(InputFile(str(path), path.stat().st_size), text_field="text", max_record_bytes=1 << 20)
    assert isinstance(bad, BadRecord) and bad.reason == "broken JSON" and good.text == "good"
    trials("YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9", 3)
