"""No password or signature of a URL, and no key of the environment, stands in anything that is written or printed."""

import base64
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gmlp_scale.data.tokenizer import train_tokenizer
from tests.data_prep.corpora import REPOSITORY, make_texts, run, write_jsonl
from tests.forked import Script


class Handler(SimpleHTTPRequestHandler):
    """Wants a password that begins with canary."""

    def send_head(self):
        password = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
        if not password.startswith(b"user:canary"):
            return self.send_error(401)
        return super().send_head()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "served"))
    threading.Thread(target=server.serve_forever).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def files_without_canary(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []
    return files


def test_no_secret_is_written_or_printed(server, tmp_path, monkeypatch, trials):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-key")
    monkeypatch.setenv("HF_TOKEN", "canary-hub")
    train_tokenizer(make_texts(600), 400, tmp_path / "tokenizer")
    for number in range(2):
        path = write_jsonl(tmp_path / f"served/part-{number}.jsonl.gz", make_texts(300, number))
    path.write_bytes(path.read_bytes()[:-100])

    def tokenize(signature: str, *options, **settings) -> str:
        sources = [
            f"http://user:canary@{server}/part-{number}.jsonl.gz?X-Amz-Date={len(signature)}&X-Amz-Signature={signature}"
            for number in range(2)
        ]
        return run(
            "tokenize_corpus.py", "--input", *sources, "--tokenizer", tmp_path / "tokenizer", "--sequence-length", 32,
            "--output", tmp_path / "shards", "--heldout-fraction", 0.1, *options, **settings,
        )  # fmt: skip

    printed = tokenize("canary-1", code=2)
    assert f"http://***@{server}/part-1.jsonl.gz?*** after " in printed
    logs = [path.read_text() for path in files_without_canary(tmp_path) if path.suffix == ".log"]
    assert any("InputError: broken files: 1" in log for log in logs)
    printed += tokenize("canary-another", "--max-bad-files", 1)  # the same job with another signature
    (tmp_path / "shards").rename(tmp_path / "served/shards")

    recipe = [
        "--config", REPOSITORY / "configs/pretrain/smoke.yaml", f"output_dir={tmp_path}/runs", "model.num_blocks=1",
        "model.sequence_length=32", "model.vocab_size=400", "train.num_steps=4", "optimizer.warmup_steps=1",
        f"data.cache_dir={tmp_path}/cache", "model.d_model=16", "model.d_ffn=32", "train.global_batch_size=4",
        "train.micro_batch_size=4", "train.num_evaluation_rows=4",
    ]  # fmt: skip
    for password, folder, options, wanted in (
        ("canary-1", "nothing", [], 2),
        ("canary-1", "shards", ["--dry-run"], 0),
        ("canary-1", "shards", ["train.stop_after_step=2"], 0),
        ("canary-2", "shards", [], 0),  # a resumed run gets the URL from the command line again
    ):
        shards = f"data.shards=http://user:{password}@{server}/{folder}"
        code, *texts = Script("launch/pretrain.py", [*recipe, *options, shards]).end()
        text = "".join(texts)
        assert code == wanted, text
        assert f"http://***@{server}/{folder}" in text
        printed += text
    assert "canary" not in printed
    names = {path.name for path in files_without_canary(tmp_path)}
    assert {"job.json", "report.json", "config.yaml", "DONE", "metrics.jsonl"} <= names
    assert f"shards: http://***@{server}/shards" in (tmp_path / "runs/smoke/config.yaml").read_text()
    trials("secrets in URLs and environment", 6)
