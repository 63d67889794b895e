"""10,000 steps with a fault about every 200, beside 10,000 undisturbed ones."""

import random
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.data.loader import Loader
from tests.damage import damaged
from tests.faults.disturbed import disturb
from tests.forked import Script
from tests.whole_runs import finish, start
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

pytestmark = pytest.mark.faults
NUM_STEPS, STEPS_PER_FAULT = 10_000, 200
RECIPE = [
    "engine.kind=single", "model.num_blocks=1", "model.d_model=8", "model.d_ffn=16", "model.sequence_length=16",
    f"model.vocab_size={VOCAB_SIZE}", f"train.num_steps={NUM_STEPS}", "train.global_batch_size=2",
    "train.micro_batch_size=2", "train.log_every_steps=100", f"train.evaluate_every_steps={NUM_STEPS}",
    "train.num_evaluation_rows=2", "optimizer.warmup_steps=10", "checkpoint.save_every_steps=50",
]  # fmt: skip


def start_in(folder: Path, fault: str | None = None) -> list[Script]:
    prepare = partial(_prepare, fault, folder.parent / f"trace of {folder.name}")
    return start([*RECIPE, f"data.shards={folder.parent}/shards", f"output_dir={folder}"], prepare=prepare)


def _prepare(fault: str | None, trace: Path) -> None:
    if fault:
        disturb(fault, trace)
    elif trace.name == "trace of whole":
        _watch_memory(trace)


def _watch_memory(trace: Path) -> None:
    """Writes the pages in memory after every 1,000 steps into `trace`."""
    unwatched = Loader.steps

    def steps(loader, start_step, stop_step):
        for number, micro_batches in enumerate(unwatched(loader, start_step, stop_step), start_step + 1):
            if number % 1000 == 0:
                with trace.open("a") as file:
                    file.write(Path("/proc/self/statm").read_text().split()[1] + "\n")
            yield micro_batches

    Loader.steps = steps


def test_ten_thousand_steps_with_a_fault_every_200(tmp_path, trials):
    write_tiny_shards(tmp_path / "shards", [500, 400], [2], sequence_length=16)
    whole = start_in(tmp_path / "whole")
    draw, disturbed, damages = random.Random(0), tmp_path / "disturbed", 0
    checkpoints = disturbed / "smoke" / "checkpoints"
    for first in range(0, NUM_STEPS, STEPS_PER_FAULT):
        fault = draw.choice(["kill", "end"])
        (rank,) = start_in(disturbed, f"0:{draw.randint(first + 101, first + STEPS_PER_FAULT)}:{fault}")
        code, _, errors = rank.end()
        assert code == {"kill": -signal.SIGKILL, "end": 0}[fault], errors
        if draw.random() < 0.3:
            newest = max(checkpoints.glob("step_?????????"))
            path = draw.choice(sorted(newest.iterdir()))
            path.write_bytes(damaged(draw, path.read_bytes(), draw.randrange(path.stat().st_size)))
            damages += 1
    finish(start_in(disturbed))
    finish(whole)
    last = f"smoke/checkpoints/step_{NUM_STEPS:09d}"
    found, wanted = Checkpoint.open(disturbed / last), Checkpoint.open(tmp_path / "whole" / last)
    assert found.keys == wanted.keys and all(torch.equal(found.read(key), wanted.read(key)) for key in wanted.keys)
    pages = [int(line) for line in (tmp_path / "trace of whole").read_text().splitlines()]
    growth = pages[-1] / pages[0] - 1
    assert growth < 0.01
    trials(
        "soak of 10,000 steps, a fault about every 200",
        NUM_STEPS // STEPS_PER_FAULT + damages,
        note=f"memory grew by {100 * growth:.2f} % from step 1,000 to 10,000 of the undisturbed run",
    )
