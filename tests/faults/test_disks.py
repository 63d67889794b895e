"""A disk that is full for the cache, and one that takes 5 s for each fsync."""

import hashlib
import itertools
import os
import resource
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.data.loader import Loader
from tests.data_prep.conftest import shards_to_read, tokenizer_dir  # noqa: F401
from tests.faults.test_soak import RECIPE
from tests.forked import Script
from tests.whole_runs import SMOKE
from tests.written_shards import write_tiny_shards

pytestmark = pytest.mark.faults


def _limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def test_a_cache_on_a_full_disk_ends_the_run_and_leaves_no_part_of_a_shard(shards_to_read, tmp_path, trials):  # noqa: F811
    arguments = [
        "--config", SMOKE, *RECIPE, f"data.shards={shards_to_read}", f"data.cache_dir={tmp_path}/cache",
        f"output_dir={tmp_path}", "train.num_steps=20", "train.stop_after_step=20", "model.sequence_length=32",
        "model.vocab_size=400", "train.evaluate_every_steps=20",
    ]  # fmt: skip
    code, _, errors = Script("launch/pretrain.py", arguments, prepare=partial(_limit_files, 15_000)).end()
    assert code == 1 and "File too large" in errors, errors
    for path in (tmp_path / "cache").glob("*.tar"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.stem
    code, _, errors = Script("launch/pretrain.py", arguments).end()
    assert code == 0, errors
    assert list((tmp_path / "cache").glob("*.tar"))
    trials("full disk during logs, cache and data jobs", 1)


def _with_a_slow_disk(trace: Path) -> None:
    torch.set_num_threads(1)
    fsync, unwatched = os.fsync, Loader.steps
    num_syncing = 0

    def slow_fsync(descriptor):
        nonlocal num_syncing
        num_syncing += 1
        time.sleep(5)
        fsync(descriptor)
        num_syncing -= 1

    def steps(loader, start_step, stop_step):
        with trace.open("w") as file:
            for number, micro_batches in enumerate(unwatched(loader, start_step, stop_step), start_step + 1):
                file.write(f"{number} {num_syncing} {time.monotonic()}\n")
                yield micro_batches

    os.fsync, Loader.steps = slow_fsync, steps


def test_steps_do_not_wait_for_a_disk_that_takes_5_s(tmp_path, trials):
    write_tiny_shards(tmp_path / "shards", [500, 400], [2], sequence_length=16)
    arguments = ["--config", SMOKE, *RECIPE, f"data.shards={tmp_path}/shards", f"output_dir={tmp_path}"]
    arguments += ["train.num_steps=3000", "train.evaluate_every_steps=3000", "checkpoint.save_every_steps=1500"]
    trace = tmp_path / "trace"
    code, _, errors = Script("launch/pretrain.py", arguments, prepare=partial(_with_a_slow_disk, trace)).end()
    assert code == 0, errors
    lines = [line.split() for line in trace.read_text().splitlines()]
    seconds = {True: [], False: []}
    for (_, _, begun), (_, num_syncing, ended) in itertools.pairwise(lines):
        seconds[num_syncing != "0"].append(float(ended) - float(begun))
    assert len(seconds[True]) > 100
    median = {syncing: sorted(values)[len(values) // 2] for syncing, values in seconds.items()}
    for step in (1500, 3000):
        Checkpoint.open(tmp_path / f"smoke/checkpoints/step_{step:09d}")
    assert max(seconds[True]) < 5
    during, other = (f"{1000 * median[syncing]:.1f} ms" for syncing in (True, False))
    note = (
        f"{len(seconds[True]):,} steps during saves; their median took {during}, the others' {other}, and the longest "
        f"{max(seconds[True]):.2f} s"
    )
    trials("fsync of 5 s under asynchronous saves", 2, note=note)
