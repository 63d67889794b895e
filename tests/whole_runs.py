"""Whole pretraining runs of a tiny recipe: started in this way or that, and what they logged."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale.distributed import logs
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from tests.forked import Script
from tests.gloo_ranks import rank_variables, run_ranks
from tests.written_shards import VOCAB_SIZE

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "configs" / "pretrain" / "smoke.yaml"
NUM_STEPS = 9
RECIPE = [
    "model.num_blocks=2", "model.d_model=16", "model.d_ffn=32", "model.sequence_length=32",
    f"model.vocab_size={VOCAB_SIZE}", f"train.num_steps={NUM_STEPS}", "train.global_batch_size=8",
    "train.micro_batch_size=2", "train.log_every_steps=1", "train.evaluate_every_steps=4",
    "train.num_evaluation_rows=10", "optimizer.warmup_steps=2", "optimizer.gradient_clipping=0.5",
    "checkpoint.save_every_steps=2",
]  # fmt: skip
CHANGING = [
    *RECIPE, "train.global_batch_size=[[0,8],[5,16]]", "data.masked_fraction=[[0,0.3],[5,0.15]]",
    "optimizer.schedule=stable", "optimizer.decay_steps=4",
]  # fmt: skip
SINGLE, FSDP2 = ["engine.kind=single"], ["engine.kind=fsdp2"]
ZERO1, ZERO2, ZERO3 = (["engine.kind=zero", f"engine.stage={stage}"] for stage in (1, 2, 3))


def run_in_turn(world_size: int, *recipes: list[str]) -> None:
    """Each of the runs to its end, one after the other, in processes of its own (DeepSpeed starts but once in one)."""
    for overrides in recipes:
        run_ranks(_pretrain, world_size, overrides)


def _pretrain(overrides: list[str]) -> None:
    pretrain(load_run_config(SMOKE, overrides))


def logged(run_folder: str | Path) -> list[dict]:
    """What the mathematics of the run decides, without speeds and memory, in the order of metrics.jsonl."""
    kept = ("step", "train/", "eval/", "data/")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in read_metrics(f"{run_folder}/metrics.jsonl")]


def losses(run_folder: str | Path) -> dict[int, float]:
    """The training loss of each logged step."""
    return {row["step"]: row["train/loss"] for row in logged(run_folder) if "train/loss" in row}


def events_of(run_folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_folder / "tensorboard")).Reload()


def assert_close(found: list[dict], wanted: list[dict]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, rel=1e-5), row["step"]


def start(
    overrides: list[str],
    world_size: int = 1,
    signals: dict[int, int] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[Script]:
    """The launcher's script on real processes, which call `prepare` first.

    `signals` gives ranks the signal that each sends itself at step 4.
    """
    arguments, prepare = ["--config", SMOKE, *overrides], partial(_prepare, signals or {}, prepare)
    return [
        Script("launch/pretrain.py", arguments, environment=variables, prepare=prepare)
        for variables in rank_variables(world_size)
    ]


def _prepare(signals: dict[int, int], prepare: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    logs.OTHERS_REPORT_AFTER_SECONDS = 0.0  # no launcher ends the others
    if prepare:
        prepare()
    evaluate = Pretraining.evaluate

    def signalled(task, engine, world, step):
        if step == 4 and world.rank in signals:
            os.kill(os.getpid(), signals[world.rank])
        return evaluate(task, engine, world, step)

    Pretraining.evaluate = signalled


def finish(ranks: list[Script]) -> str:
    """What the first rank printed, once all ranks have left with exit code 0."""
    codes, *outputs = zip(*[rank.end() for rank in ranks], strict=True)
    assert codes == (0,) * len(ranks), outputs
    return "".join(printed[0] for printed in outputs)


def refused(overrides: list[str], world_size: int = 1, code: int = 2) -> str:
    """Starts a run that every rank must refuse with this exit code; returns the first one's error."""
    codes, _, errors = zip(*[rank.end() for rank in start(overrides, world_size)], strict=True)
    assert codes == (code,) * world_size and "Traceback" not in "".join(errors), errors
    return errors[0]
