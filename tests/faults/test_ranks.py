"""Ranks that are killed, run out of memory, stand still or are ended: what the run that follows them has."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale import engine as engines
from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.engine import engine_overrides
from tests.faults.disturbed import disturb
from tests.forked import Script
from tests.gloo_ranks import free_port
from tests.whole_runs import FSDP2, ROOT, SINGLE, SMOKE, finish, logged, start
from tests.whole_runs import RECIPE as FULL_RECIPE

pytestmark = pytest.mark.faults

NUM_STEPS = 12
RECIPE = [*FULL_RECIPE, f"train.num_steps={NUM_STEPS}", "checkpoint.save_every_steps=3"]
TIMEOUT_SECONDS = 8
ENGINES = {
    name: (2 if engine.needs_process_group else 1, engine_overrides(engine)) for name, engine in engines.ENGINES.items()
}
LAUNCHERS = {
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], "fsdp2"),
    "deepspeed": (["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"], "zero, stage 1"),
}


@pytest.fixture(scope="module")
def undisturbed(forty_rows, tmp_path_factory):
    """undisturbed(engine) -> the folder of a run that was never stopped."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), set()

    def run(engine: str) -> Path:
        if engine not in known:
            finish(start_by(engine, [f"data.shards={forty_rows}", f"output_dir={folder / engine}"]))
            known.add(engine)
        return folder / engine / "smoke"

    return run


@pytest.fixture
def memory_group(monkeypatch):
    """A cgroup of 64 MB for the process that shall run out of memory, MEMORY_GROUP. None: none may be made."""
    memory_of_v1 = Path("/sys/fs/cgroup/memory")
    group = (memory_of_v1 if memory_of_v1.exists() else Path("/sys/fs/cgroup")) / f"faults_{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / ("memory.limit_in_bytes" if memory_of_v1.exists() else "memory.max")).write_text(str(2**26))
        monkeypatch.setenv("MEMORY_GROUP", str(group))
        yield group
    except OSError:
        yield None
    finally:
        group.rmdir()


def start_by(engine: str, overrides: list[str], fault: str | None = None, trace: Path | None = None) -> list[Script]:
    world_size, of_engine = ENGINES[engine]
    prepare = partial(disturb, fault, trace) if fault else None
    return start([*RECIPE, *of_engine, *overrides], world_size, prepare=prepare)


def assert_same(run_dir: Path, other: Path) -> None:
    """Losses, norms and positions of every step, and every parameter and moment, bit for bit."""
    assert logged(run_dir) == logged(other)
    last = f"checkpoints/step_{NUM_STEPS:09d}"
    checkpoint, wanted = Checkpoint.open(run_dir / last), Checkpoint.open(other / last)
    assert checkpoint.keys == wanted.keys
    for key in wanted.keys:
        assert torch.equal(checkpoint.read(key), wanted.read(key)), key


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_killed_again_and_again_ends_as_if_never_killed(
    engine, forty_rows, undisturbed, memory_group, tmp_path, trials
):
    draw, (world_size, _) = random.Random(engine), ENGINES[engine]
    recipe, trace = [f"data.shards={forty_rows}", f"output_dir={tmp_path}"], tmp_path / "trace"
    steps = sorted(draw.sample(range(2, NUM_STEPS + 1), 3))
    for step, fault in zip(steps, ("kill", "kill", "out of memory"), strict=True):
        victim = draw.randrange(world_size)
        ends = [rank.end() for rank in start_by(engine, recipe, f"{victim}:{step}:{fault}", trace)]
        assert ends[victim][0] == -signal.SIGKILL, ends
        for code, _, errors in ends[:victim] + ends[victim + 1 :]:
            assert code == 1 and "Traceback" not in errors
            assert re.search(f"^rank {victim} .* in .* step \\d", errors, re.MULTILINE), errors
    finish(start_by(engine, recipe))
    assert_same(tmp_path / "smoke", undisturbed(engine))
    trials("SIGKILL of a random rank at a random step", 2)
    how = "the kernel's own kill in a cgroup of 64 MB" if memory_group else "SIGKILL, as no cgroup could be made"
    trials("memory: killed by the kernel for lack of it", 1, note=how)


def launch(launcher: str, overrides: list[str], fault: str, trace: Path) -> subprocess.Popen:
    command, engine = LAUNCHERS[launcher]
    port = [str(free_port())] if launcher == "deepspeed" else []
    recipe = ["--config", str(SMOKE), *RECIPE, *ENGINES[engine][1], *overrides]
    environment = {"FAULT": fault, "TRACE": str(trace), "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, *command, *port, "tests/faults/disturbed.py", *recipe],
        cwd=ROOT,
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def seconds_until_gone(process: subprocess.Popen, trace: Path) -> tuple[float, str]:
    """From the fault until the launcher and the rank that met it are gone; and what they printed."""
    try:
        printed, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    seconds = time.time() - trace.stat().st_mtime
    deadline = time.monotonic() + 30  # deepspeed's launcher kills and leaves without a look
    while Path("/proc", trace.read_text()).exists():
        assert time.monotonic() < deadline, printed
        time.sleep(0.1)
    return seconds, printed


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_stands_still_under_a_launcher_is_named_and_all_end(
    launcher, forty_rows, undisturbed, tmp_path, trials
):
    recipe, trace = [f"data.shards={forty_rows}", f"output_dir={tmp_path}"], tmp_path / "trace"
    process = launch(launcher, [*recipe, f"engine.timeout_seconds={TIMEOUT_SECONDS}"], "1:5:stop", trace)
    seconds, printed = seconds_until_gone(process, trace)
    num_of_launcher = int(launcher == "torchrun")  # its own, which ends with our line
    assert process.returncode and printed.count("Traceback") == num_of_launcher, printed
    assert re.search(r"rank 1 \(host \S+\) does not answer; rank 0 waited in .* step 5", printed), printed
    assert seconds < TIMEOUT_SECONDS + 90  # of which 30 are the launcher's own patience with a rank that stands still
    engine = LAUNCHERS[launcher][1]
    finish(start_by(engine, recipe))
    assert_same(tmp_path / "smoke", undisturbed(engine))
    note = f"{launcher}: all gone {seconds:.0f} s after, of which {TIMEOUT_SECONDS} are the timeout"
    trials("SIGSTOP of a rank under a launcher", 1, note=note)


@pytest.mark.parametrize("launcher, fault", [("torchrun", "end launcher"), ("deepspeed", "end process group")])
def test_a_launcher_with_sigterm_leaves_a_checkpoint(launcher, fault, forty_rows, undisturbed, tmp_path, trials):
    engine = LAUNCHERS[launcher][1]
    recipe, trace = [f"data.shards={forty_rows}", f"output_dir={tmp_path}"], tmp_path / "trace"
    process = launch(launcher, [*recipe, "checkpoint.save_every_steps=1000"], f"0:5:{fault}", trace)
    seconds, printed = seconds_until_gone(process, trace)
    checkpoint, damaged = newest_checkpoint(tmp_path / "smoke" / "checkpoints")
    assert checkpoint and 5 <= checkpoint.step < NUM_STEPS and not damaged, printed
    assert seconds < 30  # 6 to 9 on two busy cores
    finish(start_by(engine, recipe))
    steps = [[row for row in logged(run) if "train/loss" in row] for run in (tmp_path / "smoke", undisturbed(engine))]
    assert steps[0] == steps[1]
    note = f"{launcher}: all gone {seconds:.0f} s after, exit code {process.returncode}"
    trials("SIGTERM to a launcher", 1, note=note)


@pytest.mark.parametrize("precision, tolerance", [("float32", 1e-6), ("bf16", 1e-4)])
def test_a_run_on_2_then_1_then_4_ranks_has_the_losses_of_one_on_2(precision, tolerance, forty_rows, tmp_path, trials):
    recipe = [f"train.precision={precision}", f"data.shards={forty_rows}"]
    finish(start_by("fsdp2", [*recipe, f"output_dir={tmp_path}", "name=whole"]))
    parts = [(2, FSDP2, 4, 2), (1, SINGLE, 8, 4), (4, FSDP2, NUM_STEPS, 1)]
    for world_size, engine, stop, micro_batch_size in parts:
        overrides = [*RECIPE, *engine, *recipe, f"output_dir={tmp_path}", f"train.stop_after_step={stop}"]
        finish(start([*overrides, f"train.micro_batch_size={micro_batch_size}"], world_size))
    wanted, found = (
        {row["step"]: row for row in logged(tmp_path / name) if "train/loss" in row} for name in ("whole", "smoke")
    )
    assert list(found) == list(range(1, NUM_STEPS + 1))
    for first in (5, 9):
        assert found[first]["train/loss"] == pytest.approx(wanted[first]["train/loss"], rel=tolerance)
        assert found[first]["data/samples_seen"] == wanted[first]["data/samples_seen"]
    trials("world size 2 to 1 to 4, other micro-batch", 2)
