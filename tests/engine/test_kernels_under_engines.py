"""Every kind of engine trains the same with the fused kernels as one process does in plain PyTorch."""

import pytest
import torch

from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import EngineConfig, SingleConfig
from tests.engine.trained_engines import AMLP, ENGINES, micro_batches_of, start_engine, train
from tests.triton_interpreter import run_interpreted


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
    partition_all = tmp_path / "deepspeed.json"
    partition_all.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    config = ENGINES[engine]
    if engine == "zero, stage 3":
        config = config.model_copy(update={"deepspeed_config": partition_all})
    run = run_interpreted(_train, config, "triton", world_size=1 if engine == "single" else 2)[0]
    assert run["losses"] == pytest.approx(plain_run["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(plain_run["norms"], rel=1e-5)
    torch.testing.assert_close(run["predictions"], plain_run["predictions"], rtol=1e-4, atol=1e-5)
