"""What single engines promise: DeepSpeed's settings and groups, FSDP2's short steps, kernels, a clean end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import EngineConfig, Fsdp2Config, SingleConfig, ZeroConfig
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from tests.engine.trained_engines import AMLP, ENGINES, GMLP, MUON, Run, micro_batches_of, start_engine, train
from tests.gloo_ranks import run_ranks
from tests.triton_interpreter import run_interpreted


def _file(tmp_path, content: dict):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(content))
    return path


def _settings_in_use(engine_config: ZeroConfig) -> dict:
    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, engine_config)
        train(engine, world, 0, 1)
        zero = engine.module.optimizer
        settings = {
            "bucket": zero.reduce_bucket_size,
            "overlap": zero.overlap_comm,
            "clipping": engine.module.gradient_clipping(),
            "offload": zero.cpu_offload,
        }
        engine.close()
    return settings


def test_a_file_of_the_users_own_is_merged(tmp_path):
    zero = {"stage": 2, "reduce_bucket_size": 100, "offload_optimizer": {"device": "cpu"}}
    own = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.5}
    config = ZeroConfig(stage=2, deepspeed_config=_file(tmp_path, own))
    settings = {"bucket": 100, "overlap": False, "clipping": 0.5, "offload": True}
    assert run_ranks(_settings_in_use, 1, config) == [settings]


def test_a_file_that_contradicts_the_recipe_is_refused_with_every_field(tmp_path):
    own = {
        "zero_optimization": {"stage": 3, "overlap_comm": True, "round_robin_gradients": True},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
        "torch_autocast": {"enabled": True},
        "optimizer": {"type": "Adam"},
    }
    config = ZeroConfig(stage=2, deepspeed_config=_file(tmp_path, own))
    with start_world(60, "cpu") as world, pytest.raises(ValueError) as caught:
        start_engine(world, GMLP, config)
    message = str(caught.value)
    assert "zero_optimization.stage: found 3; the recipe says 2" in message
    assert "gradient_clipping: found 1.0; the recipe says 0.5" in message
    assert "bf16.enabled: found True; the recipe says False" in message
    assert "optimizer: the recipe's own sections decide it" in message
    for name in ("zero_optimization.round_robin_gradients", "bf16.bf16_optimizer_states", "torch_autocast.enabled"):
        assert f"{name}: found True; the recipe says False" in message
    assert "overlap_comm" not in message


def test_muon_refuses_a_file_that_offloads_the_optimizer(tmp_path):
    own = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
    config = ZeroConfig(stage=2, deepspeed_config=_file(tmp_path, own))
    with start_world(60, "cpu") as world, pytest.raises(InputError, match="offloads the optimizer to cpu"):
        start_engine(world, GMLP, config, optimizer=MUON)


def _train_by_muon(engine_configs: list[ZeroConfig]) -> list[tuple[int, Run]]:
    """How many sub-groups each has, and its run."""
    runs = []
    with start_world(60, "cpu", init_group=True) as world:
        for engine_config in engine_configs:
            engine = start_engine(world, GMLP, engine_config, optimizer=MUON)
            runs.append((len(engine.muons), train(engine, world, 0, 3)))
            engine.close()
    return runs


def test_muon_updates_each_of_stage_3s_sub_groups(tmp_path):
    """DeepSpeed steps them one by one. Its default is 1e9 elements, so that only large models have several."""
    small = {"zero_optimization": {"sub_group_size": 300}}
    configs = [ZeroConfig(stage=3), ZeroConfig(stage=3, deepspeed_config=_file(tmp_path, small))]
    (num_whole, whole), (num_parts, in_parts) = run_ranks(_train_by_muon, 2, configs)[0]
    assert num_whole == 1 < num_parts
    assert in_parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert in_parts.norms == pytest.approx(whole.norms, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{,}", "cannot be read as JSON"),
        ("[]", "needed is an object"),
        ('{"zero_optimization": {"offload_optimizer": "cpu"}}', "needed is an object"),
    ],
)
def test_a_file_that_is_not_deepspeeds_is_a_mistake_of_the_recipe(tmp_path, text, found):
    (tmp_path / "own.json").write_text(text)
    overrides = ["engine.kind=zero", f"engine.deepspeed_config={tmp_path}/own.json"]
    with pytest.raises(ConfigError, match=f"engine.deepspeed_config: .*{found}"):
        load_run_config("smoke", overrides)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValidationError, match="does not point to a file"):
        ZeroConfig(deepspeed_config=tmp_path / "nowhere.json")


def _timeouts_and_prints(precision: str) -> list[float]:
    with start_world(61, "cpu") as world:
        engine = start_engine(world, GMLP, ZeroConfig(stage=1, timeout_seconds=61), precision)
        train(engine, world, 0, 1)
        timeouts = [
            group._get_backend(world.device).options._timeout.total_seconds()
            for group in dist.distributed_c10d._world.pg_map
        ]
        engine.close()
    return timeouts


def test_every_process_group_has_the_timeout_of_the_config_and_nothing_is_printed(capfd):
    for timeouts in run_ranks(_timeouts_and_prints, 2, "bf16"):
        assert timeouts == [61] * 3  # the ranks' own, the host's, DeepSpeed's
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def _linear_before_and_after() -> list[bool]:
    before = F.linear
    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, ZeroConfig(stage=3))
        replaced = F.linear is not before
        engine.close()
    return [replaced, F.linear is before]


def test_stage_3_gives_the_process_its_own_linear_back():
    assert run_ranks(_linear_before_and_after, 1) == [[True, True]]


def test_a_step_records_nothing_for_autograd_and_lists_no_parameters(monkeypatch):
    """DTensor's share of both was two thirds of a step with 144 blocks."""
    recorded = []
    to_local = DTensor.to_local

    def watched(tensor, **options):
        recorded.append(torch.is_grad_enabled())
        return to_local(tensor, **options)

    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, Fsdp2Config())
        train(engine, world, 0, 1)
        monkeypatch.setattr(DTensor, "to_local", watched)
        monkeypatch.setattr(engine.module, "named_parameters", None)
        train(engine, world, 1, 2)
        engine.close()
    assert recorded and not any(recorded)


def _train(engine_config: EngineConfig, kernels: str) -> dict:
    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, AMLP.model_copy(update={"kernels": kernels}), engine_config)
        batch = micro_batches_of(99, world)[0]
        initial_predictions = engine.predict(batch)  # before a forward pass has shown which module reads what
        run = train(engine, world, 0, 2)
        predictions = torch.stack([initial_predictions, engine.predict(batch)])
        engine.close()
    return {"losses": run.losses, "norms": run.norms, "predictions": predictions}


@pytest.fixture(scope="module")
def plain_run() -> dict:
    return run_interpreted(_train, SingleConfig(), "torch")[0]


@pytest.mark.parametrize("engine", ["single", "fsdp2, reshard_after_forward", "zero, stage 3"])
def test_engines_train_the_same_by_kernels(plain_run, tmp_path, engine):
    # No parameter is small enough for ZeRO-3 to keep it gathered.
    partition_all = _file(tmp_path, {"zero_optimization": {"stage3_param_persistence_threshold": 0}})
    config = ENGINES[engine]
    if engine == "zero, stage 3":
        config = config.model_copy(update={"deepspeed_config": partition_all})
    run = run_interpreted(_train, config, "triton", world_size=1 if engine == "single" else 2)[0]
    assert run["losses"] == pytest.approx(plain_run["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(plain_run["norms"], rel=1e-5)
    torch.testing.assert_close(run["predictions"], plain_run["predictions"], rtol=1e-4, atol=1e-5)


HERE = Path(__file__).parent


def test_every_start_of_each_engine_ends_cleanly(trials, pytestconfig):
    num_starts = 20 if pytestconfig.getoption("--faults") else 2
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    finished = subprocess.run(
        [sys.executable, str(HERE / "start_and_end.py"), str(num_starts), *ENGINES],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]
    assert not finished.stderr
    trials("starts of each engine end cleanly", num_starts * len(ENGINES))
