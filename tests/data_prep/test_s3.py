"""From a bucket to a bucket to a batch, against a real S3 server that falters."""

import json
import os
from pathlib import Path

import fsspec
import pytest
import torch

from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.data_config import DataConfig
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import CorruptShardError, ShardError
from gmlp_scale.data.shards import Manifest, ShardRows
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import read_file, write_file
from tests.data_prep.corpora import REPOSITORY, contents, run
from tests.forked import Script, fork
from tests.storage.test_claim import check_races


def upload(client, folder: Path, prefix: str) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(path), "bucket", f"{prefix}/{path.relative_to(folder)}")


def make_loader(folder, cache_dir, run_dir, **data) -> Loader:
    return Loader(
        DataConfig(shards=str(folder), cache_dir=cache_dir and str(cache_dir), **data),
        BatchPlan(seed=0, batch_sizes=Piecewise(8), micro_batch_size=8),
        sequence_length=32,
        vocab_size=400,
        run_dir=run_dir,
    )


def same_batches(one: Loader, other: Loader, num_steps: int) -> bool:
    pairs = zip(one.steps(0, num_steps), other.steps(0, num_steps), strict=True)
    return all(torch.equal(a[0].token_ids_BN, b[0].token_ids_BN) for a, b in pairs)


def test_bucket_to_bucket_gives_the_same_bytes_with_and_without_faults(
    s3, server, corpus, tokenizer_dir, shards_to_read, tmp_path, trials
):
    before = server.faults
    upload(s3, corpus, "corpus")
    expected = contents(shards_to_read)
    for name, fault_fraction in (("calm", 0.0), ("faulty", 0.1)):
        server.fault_fraction = fault_fraction
        run(
            "tokenize_corpus.py", "--input", "s3://bucket/corpus/*.gz", "--tokenizer", tokenizer_dir, "--output",
            f"s3://bucket/{name}", "--sequence-length", 32, "--heldout-fraction", 0.1, "--shard-bytes", 20_000,
        )  # fmt: skip
        found = {key: read_file(f"s3://bucket/{name}/{key}") for key in expected}
        assert found == expected
    assert server.faults > 10
    assert "0 problems" in run("verify_shards.py", "s3://bucket/faulty")
    trials("S3: 10 % of answers 503, reset, cut or late", server.faults - before)


def test_training_from_a_bucket_through_the_cache_where_a_bad_copy_is_fetched_again(
    s3, server, shards_to_read, tmp_path
):
    upload(s3, shards_to_read, "shards")
    server.fault_fraction = 0.1
    with pytest.raises(ShardError, match=r"set data\.cache_dir"):
        make_loader("s3://bucket/shards", None, tmp_path)
    local = make_loader(shards_to_read, None, tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / f"cache/{local.sources[0].manifest.splits.train[0].sha256}.tar").write_bytes(b"half")
    remote = make_loader("s3://bucket/shards", tmp_path / "cache", tmp_path)
    assert remote.fingerprint() == local.fingerprint()
    num_steps = local.num_rows // 8
    assert same_batches(local, remote, num_steps)
    cached = sorted(path.name for path in (tmp_path / "cache").glob("*.tar"))
    assert cached == sorted(f"{shard.sha256}.tar" for shard in local.sources[0].manifest.splits.train)

    server.fault_fraction = 1.0  # nothing is fetched a second time
    restarted = make_loader(shards_to_read, None, tmp_path)
    restarted.sources[0]._shards._files = remote.sources[0]._files
    assert same_batches(local, restarted, num_steps)
    for loader in (local, remote, restarted):
        loader.close()


@pytest.mark.faults
def test_answers_that_never_come_are_asked_for_again(s3, server, shards_to_read, tmp_path, monkeypatch, trials):
    upload(s3, shards_to_read, "shards")
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 1)
    before, server.fault_fraction, server.is_late = server.faults, 0.1, True
    for number in range(5):
        files = ShardFiles("s3://bucket/shards", str(tmp_path / f"cache-{number}"))
        for shard in Manifest.load("s3://bucket/shards").splits.train:
            assert files.local_path(shard).read_bytes() == (shards_to_read / shard.name).read_bytes()
    assert server.faults > before
    trials("S3: 10 % of answers 503, reset, cut or late", server.faults - before)


def test_a_key_that_is_refused_is_reported_at_once(s3, server, shards_to_read, tmp_path, trials):
    upload(s3, shards_to_read, "shards")
    shard = Manifest.load(shards_to_read).splits.train[0]
    files = ShardFiles("s3://bucket/shards", str(tmp_path / "cache"))
    server.is_refusing = True
    for read in (lambda: files.local_path(shard), lambda: Manifest.load("s3://bucket/shards")):
        before = server.refusals
        with pytest.raises(PermissionError, match="s3://bucket/shards/"):
            read()
        assert server.refusals == before + 1
    assert not list((tmp_path / "cache").glob("*.tar"))
    trials("S3: 403 and 404", 2)


def test_permanent_errors_name_the_object_at_once(s3, server, shards_to_read, tmp_path, trials):
    upload(s3, shards_to_read, "shards")
    shards = Manifest.load(shards_to_read).splits.train
    s3.delete_object(Bucket="bucket", Key=f"shards/{shards[0].name}")
    s3.put_object(Bucket="bucket", Key=f"shards/{shards[1].name}", Body=b"other")
    files = ShardFiles("s3://bucket/shards", str(tmp_path / "cache"))
    with pytest.raises(CorruptShardError, match=rf"s3://bucket/shards/{shards[0].name} does not exist"):
        files.local_path(shards[0])
    with pytest.raises(CorruptShardError, match=f"{shards[1].name} is corrupt: it has 5 bytes"):
        files.local_path(shards[1])
    assert not list((tmp_path / "cache").glob("*.tar"))
    with pytest.raises(FileNotFoundError, match="no shards at s3://bucket/nothing"):
        Manifest.load("s3://bucket/nothing")
    trials("S3: 403 and 404", 3)


def test_the_cache_evicts_what_was_used_longest_ago(shards_to_read, tmp_path):
    shards = Manifest.load(shards_to_read).splits.train[:4]
    room = (shards[0].bytes + shards[2].bytes + shards[3].bytes) / 0.9  # a tenth is freed at once
    files = ShardFiles(str(shards_to_read), str(tmp_path / "cache"), max_bytes=room)
    opened = ShardRows(files.local_path(shards[0]), shards[0], 32)
    for age, shard in ((30, shards[1]), (20, shards[2])):
        path = files.local_path(shard)
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    files.local_path(shards[3])
    assert {path.stem for path in (tmp_path / "cache").glob("*.tar")} == {shards[i].sha256 for i in (0, 2, 3)}
    files = ShardFiles(str(shards_to_read), str(tmp_path / "cache"), max_bytes=1)
    files.local_path(shards[1])
    assert {path.stem for path in (tmp_path / "cache").glob("*.tar")} == {shards[1].sha256}
    assert len(opened.read([0, 1])) == 2  # an evicted shard that is open stays readable


def fetch_and_die(folder: str, cache_dir: str) -> None:
    files = ShardFiles(folder, cache_dir)
    write = Path.write_bytes

    def write_half_and_die(path: Path, content: bytes):
        write(path, content[: len(content) // 2])
        os.kill(os.getpid(), 9)

    Path.write_bytes = write_half_and_die
    files.local_path(Manifest.load(folder).splits.train[0])


def test_a_rank_killed_while_it_fetches_leaves_nothing_that_is_read(shards_to_read, tmp_path, trials):
    process = fork(fetch_and_die, str(shards_to_read), str(tmp_path / "cache"))
    process.join()
    assert process.exitcode == -9
    assert not list((tmp_path / "cache").glob("*.tar"))
    shard = Manifest.load(shards_to_read).splits.train[0]
    path = ShardFiles(str(shards_to_read), str(tmp_path / "cache")).local_path(shard)
    assert path.read_bytes() == (shards_to_read / shard.name).read_bytes()
    trials("SIGKILL of a random rank at a random step", 1)


def test_of_jobs_that_start_together_one_holds_a_bucket(s3, server, quick):
    server.fault_fraction = 0.1
    check_races("s3://bucket/out/job/claims", 2)


def test_any_fsspec_store_will_do():
    write_file("memory://folder/file", b"content")
    assert read_file("memory://folder/file") == b"content"
    fsspec.filesystem("memory").rm("/folder", recursive=True)


def test_pretraining_from_a_bucket(s3, server, shards_to_read, tmp_path, trials):
    upload(s3, shards_to_read, "shards")
    before = server.faults
    server.fault_fraction = 0.1
    arguments = [
        "--config", REPOSITORY / "configs/pretrain/smoke.yaml", "data.shards=s3://bucket/shards",
        f"data.cache_dir={tmp_path}/cache", f"output_dir={tmp_path}", "model.sequence_length=32",
        "model.vocab_size=400", "train.num_steps=6", "train.evaluate_every_steps=6",
    ]  # fmt: skip
    code, _, errors = Script("launch/pretrain.py", arguments).end()
    assert code == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "smoke/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert any("eval/loss" in line for line in lines)
    assert list((tmp_path / "cache").glob("*.tar"))
    trials("S3: 10 % of answers 503, reset, cut or late", server.faults - before)
