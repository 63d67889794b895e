"""train.precision=auto: what multiplies faster here, decided by rank 0 once and kept by the run's checkpoints."""

from types import SimpleNamespace

import pytest
import torch
import yaml

from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.errors import OtherRankError
from gmlp_scale.models import build_model
from gmlp_scale.plan import precision
from gmlp_scale.plan.describe import describe
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train import resolve
from gmlp_scale.train.resolve import with_decided_precision
from gmlp_scale.train.run import pretrain
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import FAMILIES, tiny_config
from tests.whole_runs import RECIPE, SMOKE
from tests.written_shards import write_tiny_shards


def smoke(*overrides: str):
    return load_run_config(SMOKE, [*RECIPE, "train.precision=auto", "data.shards=not/there", *overrides])


def world_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), is_main=True, on_main=lambda action: action())


@pytest.mark.parametrize("faster", ["float32", "bf16"])
def test_the_faster_block_decides_on_a_busy_machine_too(faster, monkeypatch, tmp_path):
    clocks, passes = {"process_time": 0.0, "perf_counter": 0.0}, []

    def training_pass(run, of):
        def tick() -> None:
            clocks["process_time"] += 0.1 if of == faster else 0.2
            clocks["perf_counter"] += 0.3 if of == faster else 0.2  # other programs had the core
            passes.append(of)

        return tick

    monkeypatch.setattr(precision, "_training_pass", training_pass)
    for name in clocks:
        monkeypatch.setattr(precision.time, name, lambda name=name: clocks[name])
    run = with_decided_precision(smoke(f"output_dir={tmp_path}"), world_on("cpu"))
    assert run.train.precision == faster
    assert passes == ["float32", "bf16"] * 3, "one pass of each that is not counted, then turns for 0.6 seconds"


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_kind_of_block_can_be_timed(kind, monkeypatch):
    run, models = smoke().model_copy(update={"model": tiny_config(kind)}), []
    monkeypatch.setattr(precision, "build_model", lambda config: models.append(build_model(config)) or models[-1])
    for of, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        precision._training_pass(run, of)()
        (block,) = models[-1].blocks
        matrices = [parameter for parameter in block.parameters() if parameter.ndim == 2]
        assert matrices and {matrix.grad.dtype for matrix in matrices} == {dtype}


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_not_timed(has_bf16, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    run = with_decided_precision(smoke(f"output_dir={tmp_path}"), world_on("cuda"))
    assert run.train.precision == ("bf16" if has_bf16 else "float32")


def test_dry_run_says_that_it_is_decided_later():
    text = describe(smoke(), world_size=1)
    assert "precision: auto" in text and "decided when the run starts; below are float32's figures" in text


def _train(answer: str | None, overrides: list[str]) -> int:
    """How often this rank measured. answer: what it finds; None if it must not measure."""
    measured = []

    def faster_precision(run, device) -> str:
        measured.append(answer)
        return answer

    resolve.faster_precision = faster_precision
    pretrain(smoke(*overrides))
    return len(measured)


def test_ranks_agree_and_a_resumed_run_keeps_it(tmp_path):
    write_tiny_shards(tmp_path / "shards", [17, 23], [12], sequence_length=32)
    recipe = [
        "train.num_steps=4", "optimizer.warmup_steps=2", "engine.kind=fsdp2", "name=auto",
        f"data.shards={tmp_path / 'shards'}", f"output_dir={tmp_path}",
    ]  # fmt: skip
    assert run_ranks(_train, 2, "bf16", [*recipe, "train.stop_after_step=2"]) == [1, 0]
    assert run_ranks(_train, 2, None, recipe) == [0, 0]
    checkpoint, _ = newest_checkpoint(tmp_path / "auto" / "checkpoints")
    assert checkpoint.step == 4
    assert checkpoint.details["config"]["train"]["precision"] == "bf16"
    assert yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())["train"]["precision"] == "bf16"


def _train_beside_a_broken_file(overrides: list[str]) -> str:
    try:
        pretrain(smoke(*overrides))
    except (ConfigError, OtherRankError) as error:
        return type(error).__name__
    return "it trained"


def test_a_config_that_rank_0_cannot_read_ends_all_ranks(tmp_path):
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "config.yaml").write_text("{")
    recipe = ["engine.kind=fsdp2", "engine.timeout_seconds=300", "name=auto", f"output_dir={tmp_path}"]
    assert run_ranks(_train_beside_a_broken_file, 2, recipe) == ["ConfigError", "OtherRankError"]


def test_a_branch_has_the_precision_of_its_trunk(tmp_path):
    trunk = smoke("train.precision=bf16", "name=trunk", f"output_dir={tmp_path}")
    (tmp_path / "trunk").mkdir()
    (tmp_path / "trunk" / "config.yaml").write_text(trunk.to_yaml())
    branch = smoke("name=branch", f"output_dir={tmp_path}", f"branch_from={tmp_path / 'trunk'}@2")
    assert with_decided_precision(branch, world_on("cpu")).train.precision == "bf16"
    assert "would resume from       " + f"{tmp_path / 'trunk'}@2" in describe(branch, world_size=1)
