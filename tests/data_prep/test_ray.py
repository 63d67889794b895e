"""A job on a real Ray cluster of two nodes, one of which is killed while a task runs on it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.data_prep.corpora import REPOSITORY, contents, run

ray_cluster = pytest.importorskip("ray.cluster_utils", reason="needs the package ray")
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture
def cluster(tmp_path):
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster
    cluster.shutdown()


class SlowHandler(SimpleHTTPRequestHandler):
    def do_GET(self):
        if "Range" in self.headers:  # a task reads; the job itself only asks whether the file is there
            self.server.waiting.append(self.path)
            if len(self.server.waiting) == 2:  # the task on the second node, which is killed, never gets an answer
                self.server.ended.wait()
            self.server.release.wait()
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def slow_files(corpus):
    """Serves the corpus to tasks only once `release` is set; lists the requests that wait, or waited, for that."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=str(corpus)))
    server.release, server.ended, server.waiting = threading.Event(), threading.Event(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.release.set(), server.ended.set()
    server.shutdown()
    server.server_close()


def wait_for(condition: Callable[[], bool], job: subprocess.Popen) -> None:
    while not condition():
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)


def test_a_job_on_ray_outlives_a_killed_node(cluster, slow_files, tokenizer_dir, corpus, tmp_path):
    urls = [f"http://127.0.0.1:{slow_files.server_port}/{path.name}" for path in sorted(corpus.iterdir())]
    options = ("--tokenizer", tokenizer_dir, "--sequence-length", 32, "--workers", 2)
    script = [sys.executable, REPOSITORY / "data_prep/tokenize_corpus.py", "--input", *urls, *options]
    job = subprocess.Popen(
        [*map(str, script), "--output", tmp_path / "ray", "--executor", "ray"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"TQDM_DISABLE": "1", "RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    wait_for(lambda: len(slow_files.waiting) == 1, job)
    second_node = cluster.add_node(**NODE)  # only now, so that the job itself has joined the first
    wait_for(lambda: len(slow_files.waiting) == 2, job)  # each node has room for one task, so both work on one
    cluster.remove_node(second_node, allow_graceful=False)
    slow_files.release.set()
    output, errors = job.communicate()
    assert job.returncode == 0, f"{output}\n{errors}"
    assert "documents                            900" in output
    assert slow_files.waiting.count(slow_files.waiting[1]) == 2  # asked again, from the other node
    run("tokenize_corpus.py", "--input", f"{corpus}/*", *options, "--output", tmp_path / "local")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_without_a_cluster_there_is_one_clear_error(tokenizer_dir, corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = run("tokenize_corpus.py", "--input", f"{corpus}/*.gz", "--tokenizer", tokenizer_dir, "--sequence-length",
                  32, "--output", tmp_path / "out", "--executor", "ray", code=1)  # fmt: skip
    assert "--executor ray finds no cluster" in message
