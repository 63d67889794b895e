"""train.micro_batch_size=auto: the largest micro-batch that fits, and a run that is the same but for it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from gmlp_scale import micro_batch, plan
from gmlp_scale.config import ConfigError, load_run_config
from gmlp_scale.plan.describe import (
    describe,
    divisors,
    largest_that_fits,
    micro_batch_size_on_cpu,
    row_bytes,
    state_bytes,
)
from gmlp_scale.plan.micro_batch import largest_micro_batch_size
from gmlp_scale.run import load_pretrained, pretrain
from gmlp_scale.train.metrics import read_metrics
from gmlp_scale.world import start_world
from tests.gloo_ranks import run_ranks
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

SMOKE = Path(__file__).parent.parent / "configs" / "pretrain" / "smoke.yaml"
SIZES = ["model.d_model=16", "model.d_ffn=32", "model.sequence_length=32", f"model.vocab_size={VOCAB_SIZE}"]
AUTO = "train.micro_batch_size=auto"


def smoke(*overrides: str):
    return load_run_config(SMOKE, [*SIZES, *overrides])


def bytes_for(run, num_rows: int, world_size: int = 1) -> float:
    """The memory of a machine on which micro-batches of `num_rows` just fit."""
    states = state_bytes(run.with_micro_batch_size(num_rows), world_size)
    copy = 12 * plan.count_parameters(run) / world_size
    return (states + copy + num_rows * row_bytes(run)) / (1 - plan.MEMORY_MARGIN)


def test_the_largest_that_fits_is_found_from_above():
    tried = []

    def fits(candidate: int) -> bool:
        tried.append(candidate)
        return candidate <= 7

    assert largest_that_fits(divisors(24), fits) == 6
    assert tried == [24, 12, 8, 6]
    assert largest_that_fits([8, 9], fits) == 0
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_on_the_cpu_the_count_decides(num_rows, monkeypatch):
    run = smoke(AUTO)
    monkeypatch.setattr(plan, "available_memory_bytes", lambda: bytes_for(run, num_rows) + 1)
    assert micro_batch_size_on_cpu(run, world_size=1, ranks_per_node=1) == num_rows
    assert micro_batch_size_on_cpu(run, world_size=1, ranks_per_node=10) == 0
    monkeypatch.setattr(plan, "available_memory_bytes", lambda: bytes_for(run, num_rows) - 1)
    assert micro_batch_size_on_cpu(run, world_size=1, ranks_per_node=1) == num_rows // 2


def test_recomputation_makes_room_for_more_rows():
    sizes = [row_bytes(smoke(f"train.recompute={recompute}", "model.num_blocks=12")) for recompute in ("full", "none")]
    assert sizes[0] < 0.8 * sizes[1]


def test_free_memory_is_between_nothing_and_all():
    assert 0 < plan.available_memory_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _found_by_each(overrides: list[str], available: list[int]) -> int:
    with start_world(60, "cpu", init_group=True) as world:
        plan.available_memory_bytes = lambda: available[world.rank]
        return largest_micro_batch_size(smoke(*overrides), world)


def test_ranks_of_one_node_share_its_memory_and_agree_on_the_smallest():
    run = smoke(AUTO, "engine.kind=fsdp2")
    enough_for_4, enough_for_2 = (2 * int(bytes_for(run, num_rows, 2) + 1) for num_rows in (4, 2))
    overrides = [AUTO, "engine.kind=fsdp2"]
    assert run_ranks(_found_by_each, 2, overrides, [enough_for_4, enough_for_4]) == [4, 4]
    assert run_ranks(_found_by_each, 2, overrides, [enough_for_4, enough_for_2]) == [2, 2]


def test_on_a_gpu_the_attempts_decide(monkeypatch):
    """The device is a stand-in: of the GPU's part this holds the search, and below that the attempt runs at all."""
    attempts = []

    def run_micro_batches(run, world) -> None:
        attempts.append(run.train.micro_batch_size)
        if attempts[-1] > 2:
            raise torch.OutOfMemoryError

    forgotten_peaks = []
    monkeypatch.setattr(micro_batch, "_run_micro_batches", run_micro_batches)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: forgotten_peaks.append(attempts[-1]))
    world = SimpleNamespace(device=torch.device("cuda"), size=1, gather=lambda value: [value])
    assert largest_micro_batch_size(smoke(AUTO), world) == 2
    assert attempts == forgotten_peaks == [8, 4, 2]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_attempt_trains_and_evaluates_beside_the_room_for_states(precision, monkeypatch):
    run = smoke(f"train.precision={precision}", "train.micro_batch_size=2", "train.recompute=selective")
    room, empty = [], torch.empty

    def recording_empty(*size, **options):
        if options.get("dtype") == torch.uint8:
            room.extend(size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", recording_empty)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    micro_batch._run_micro_batches(run, SimpleNamespace(device=torch.device("cpu"), size=1))
    low = 2 if precision == "bf16" else 4
    assert room == [int(state_bytes(run, 1) - 2 * low * plan.count_parameters(run) + 50)]


def test_nothing_fits_is_one_clear_message(monkeypatch):
    monkeypatch.setattr(plan, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found auto, but not one row fits; needed: "):
        describe(smoke(AUTO), world_size=1)


def test_ranks_must_divide_the_global_batch():
    run = smoke(AUTO, "engine.kind=fsdp2")
    assert run.rows_per_rank(4) == 2
    with pytest.raises(ConfigError, match=r"train.global_batch_size: found 8; must be a multiple .* ranks, 3"):
        run.rows_per_rank(3)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "true", "null"])
def test_what_is_neither_a_number_of_rows_nor_auto_is_refused(value):
    with pytest.raises(ConfigError, match=r"train.micro_batch_size: found .*; needed: a positive integer or auto"):
        smoke(f"train.micro_batch_size={value}")


def test_dry_run_says_what_it_can(monkeypatch):
    on_cpu = smoke(AUTO)
    monkeypatch.setattr(plan, "available_memory_bytes", lambda: bytes_for(on_cpu, 4) + 1)
    text = describe(on_cpu, world_size=1)
    assert "micro_batch_size: auto" in text
    assert "2 micro-batches of 4 rows each (train.micro_batch_size=auto, by the memory that is free here now)" in text
    text = describe(smoke(AUTO, "train.device=auto"), world_size=1)
    assert "8 rows each, in micro-batches that are decided when the run starts" in text


def test_fsdp2_holds_whole_gradients_while_it_accumulates():
    run = smoke("engine.kind=fsdp2", "train.micro_batch_size=4")
    assert not run.accumulates(2) and run.accumulates(1)
    accumulating = run.with_micro_batch_size(2)
    gradients = 4 * plan.count_parameters(run)
    assert state_bytes(accumulating, 2) - state_bytes(run, 2) == gradients / 2


def _train(overrides: list[str], available: int) -> None:
    plan.available_memory_bytes = lambda: available
    pretrain(smoke(*overrides))


def test_a_run_is_the_same_but_for_rounding(tmp_path, capfd):
    world_size = 2
    write_tiny_shards(tmp_path / "shards", [17, 23], [12], sequence_length=32)
    recipe = [
        "train.num_steps=6", "optimizer.warmup_steps=2", "train.evaluate_every_steps=3", "engine.kind=fsdp2",
        f"data.shards={tmp_path / 'shards'}", f"output_dir={tmp_path}", "optimizer.gradient_clipping=0.5",
    ]  # fmt: skip
    available = world_size * int(bytes_for(smoke(AUTO, *recipe), 4, world_size) + 1)
    run_ranks(_train, world_size, [*recipe, "train.micro_batch_size=1", "name=number"], available)
    run_ranks(_train, world_size, [*recipe, AUTO, "name=auto", "train.stop_after_step=3"], available)
    run_ranks(_train, world_size, [*recipe, AUTO, "name=auto"], available)
    assert f"train.micro_batch_size: auto is 4 of the {8 // world_size} rows of a rank" in capfd.readouterr().err

    number, auto = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("number", "auto"))
    assert [row["step"] for row in auto] == [row["step"] for row in number] and len(auto) == 8
    for tag in ("train/loss", "train/grad_norm", "eval/loss"):
        found, wanted = ([row[tag] for row in rows if tag in row] for rows in (auto, number))
        assert found and found == pytest.approx(wanted, rel=1e-6), tag

    written = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert written["train"]["micro_batch_size"] == "auto"
    run, checkpoint, _ = load_pretrained(tmp_path / "auto")
    assert run.train.micro_batch_size == checkpoint.details["config"]["train"]["micro_batch_size"] == 4
