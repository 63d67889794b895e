"""A job on a real Ray cluster of two nodes, one of which is killed while a task runs on it."""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.data_prep.corpora import contents, make_texts, run, start, write_jsonl

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="needs the package ray")
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture
def cluster(tmp_path):
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster
    cluster.shutdown()


def wait_for(condition: Callable[[], bool], job: subprocess.Popen) -> None:
    while not condition():
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)


def test_a_job_on_ray_outlives_a_killed_node(cluster, tokenizer_dir, tmp_path):
    for number in range(8):
        write_jsonl(tmp_path / f"corpus/part-{number}.jsonl.gz", make_texts(15_000, number))
    options = ("--input", f"{tmp_path}/corpus/*.gz", "--tokenizer", tokenizer_dir, "--sequence-length", 32,
               "--workers", 2)  # fmt: skip
    job = start("tokenize_corpus.py", *options, "--output", tmp_path / "ray", "--executor", "ray",
                environment={"RAY_ADDRESS": cluster.address})  # fmt: skip
    wait_for(lambda: (tmp_path / "ray/job/executor-tokenizing/logs").exists(), job)
    second_node = cluster.add_node(**NODE)  # only now, so that the job itself has joined the first
    started, done = tmp_path / "ray/job/executor-tokenizing/logs", tmp_path / "ray/job/receipts"
    wait_for(lambda: len(list(started.glob("*.log"))) - len(list(done.glob("0*.json"))) == 2, job)
    cluster.remove_node(second_node, allow_graceful=False)  # both nodes are in the midst of a task
    output, errors = job.communicate(timeout=100)
    assert job.returncode == 0, f"{output}\n{errors}"
    assert "documents                            120,000" in output
    run("tokenize_corpus.py", *options, "--output", tmp_path / "local")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_without_a_cluster_there_is_one_clear_error(tokenizer_dir, corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = run("tokenize_corpus.py", "--input", f"{corpus}/*.gz", "--tokenizer", tokenizer_dir, "--sequence-length",
                  32, "--output", tmp_path / "out", "--executor", "ray", code=1)  # fmt: skip
    assert "--executor ray finds no cluster" in message
