"""From a bucket to a bucket to a batch, against a real S3 server that falters."""

import json
from pathlib import Path

import pytest
import torch

from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, load_manifests
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.manifest import CorruptShardError, ShardError, ShardFiles
from gmlp_scale.data.shards import Manifest
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import read_file
from tests.data_prep.corpora import REPOSITORY, contents, run
from tests.forked import Script
from tests.storage.test_claim import check_races


def upload(client, folder: Path, prefix: str) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(path), "bucket", f"{prefix}/{path.relative_to(folder)}")


def make_loader(folder, cache_dir, run_dir, **data) -> Loader:
    config = DataConfig(shards=str(folder), cache_dir=cache_dir and str(cache_dir), **data)
    plan = BatchPlan(seed=0, batch_sizes=Piecewise(8), micro_batch_size=8)
    return Loader(config, plan, load_manifests(config, 32, 400), run_dir=run_dir)


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
    restarted.sources[0].files = remote.sources[0].files
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


def test_missing_and_damaged_objects_and_a_refused_key_are_reported_at_once(
    s3, server, shards_to_read, tmp_path, trials
):
    upload(s3, shards_to_read, "shards")
    shards = Manifest.load(shards_to_read).splits.train
    s3.delete_object(Bucket="bucket", Key=f"shards/{shards[0].name}")
    s3.put_object(Bucket="bucket", Key=f"shards/{shards[1].name}", Body=b"other")
    files = ShardFiles("s3://bucket/shards", str(tmp_path / "cache"))
    with pytest.raises(CorruptShardError, match=rf"s3://bucket/shards/{shards[0].name} does not exist"):
        files.local_path(shards[0])
    with pytest.raises(CorruptShardError, match=f"{shards[1].name} is corrupt: it has 5 bytes"):
        files.local_path(shards[1])
    with pytest.raises(FileNotFoundError, match="no shards at s3://bucket/nothing"):
        Manifest.load("s3://bucket/nothing")
    server.is_refusing = True
    for read in (lambda: files.local_path(shards[2]), lambda: Manifest.load("s3://bucket/shards")):
        before = server.refusals
        with pytest.raises(PermissionError, match="s3://bucket/shards/"):
            read()
        assert server.refusals == before + 1
    assert not list((tmp_path / "cache").glob("*.tar"))
    trials("S3: 403 and 404", 5)


def test_of_jobs_that_start_together_one_holds_a_bucket(s3, server, quick):
    server.fault_fraction = 0.1
    check_races("s3://bucket/out/job/claims", 2)


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
