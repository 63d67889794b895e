"""The training loop: a step that does not log never makes the host wait for the device."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gmlp_scale.data.loader import DataConfig, Loader
from gmlp_scale.engine import Fsdp2Config, SingleConfig, build_engine
from gmlp_scale.engine.optimizer import OptimizerConfig, build_adamw, decayed_names
from gmlp_scale.models import AmlpConfig, GmlpConfig, MixerConfig, TransformerConfig, build_model
from gmlp_scale.train.loop import TrainConfig, train
from gmlp_scale.train.metrics import Metrics
from gmlp_scale.train.start_up import StartUp
from gmlp_scale.world import start_world
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

SIZES = {"num_blocks": 2, "d_model": 16, "d_ffn": 32, "sequence_length": 32, "vocab_size": VOCAB_SIZE}
MODELS = {
    "gmlp": GmlpConfig(**SIZES),
    "amlp": AmlpConfig(**SIZES, d_attn=8),
    "bert": TransformerConfig(**SIZES, num_heads=2, positions="relative"),
    "mixer": MixerConfig(**SIZES, d_spatial=8),
}
NUM_STEPS = 5
TRAIN = TrainConfig(
    num_steps=NUM_STEPS, global_batch_size=4, micro_batch_size=2, log_every_steps=100, evaluate_every_steps=100
)
OPTIMIZER = OptimizerConfig(warmup_steps=1, gradient_clipping=0.5)

WAITING = {
    torch.ops.aten._local_scalar_dense,  # item, float, int, bool, tolist of a tensor
    torch.ops.aten.equal,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.nonzero,
    torch.ops.aten._unique2,
}


class RefusesToWait(TorchDispatchMode):
    """Raises at whatever would make the host wait for a GPU, on any device."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert function.overloadpacket not in WAITING, f"{function} waits for the device"
        if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
            assert not any(i is not None and i.dtype == torch.bool for i in arguments[1]), "a boolean index waits"
        return function(*arguments, **(keywords or {}))


class ErrorIfCudaWaits:
    """torch's own watch, which sees every synchronisation but knows only CUDA."""

    def __enter__(self):
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exception):
        torch.cuda.set_sync_debug_mode("default")


class WatchedLoader:
    """Every step but the first, which the start-up log waits for, and the last, which is logged, is watched."""

    wait_seconds = 0.0

    def __init__(self, loader: Loader, watch: type):
        self.loader, self.watch = loader, watch

    def steps(self, start_step: int, stop_step: int):
        for step, micro_batches in enumerate(self.loader.steps(start_step, stop_step), start=start_step):
            if step in (start_step, stop_step - 1):
                yield micro_batches
            else:
                with self.watch():
                    yield micro_batches


def run_loop(model_config, engine_config, device: str, precision: str, watch: type, tmp_path) -> int:
    """Trains for NUM_STEPS; returns the last step."""
    write_tiny_shards(tmp_path / "shards", [40], sequence_length=32)
    with start_world(60, device, init_group=True, hear_stop_signals=False) as world:
        model = build_model(model_config)
        model.init_weights(torch.Generator().manual_seed(0))
        engine = build_engine(
            model,
            engine_config,
            world,
            build_optimizer=functools.partial(build_adamw, config=OPTIMIZER, decayed=decayed_names(model)),
            precision=precision,
            num_micro_batches=2,
            micro_batch_size=2,
            gradient_clipping=0.5,
            compile=False,
            recompute="none",
        )
        loader = Loader(
            DataConfig(shards=str(tmp_path / "shards")),
            sequence_length=32,
            vocab_size=VOCAB_SIZE,
            seed=0,
            global_batch_size=4,
            micro_batch_size=2,
            rank=0,
            world_size=1,
            run_dir=tmp_path,
        )
        metrics = Metrics(
            tmp_path,
            world,
            start_step=0,
            num_steps=NUM_STEPS,
            tokens_per_step=128,
            rows_per_step=4,
            rows_per_epoch=40,
            flops_per_step=1,
            peak_tflops_per_device=None,
        )
        progress = train(
            TRAIN,
            OPTIMIZER,
            world=world,
            engine=engine,
            loader=WatchedLoader(loader, watch),
            checkpointer=SimpleNamespace(save=lambda *_: 0.0, wait=lambda: None),
            save_every_steps=100,
            details={},
            metrics=metrics,
            evaluate=lambda step: {},
            start_step=0,
            seed=0,
            start_up=StartUp(0.0),
        )
        metrics.close()
        loader.close()
        engine.close()
    return progress.step


@pytest.mark.parametrize("engine_config", [SingleConfig(), Fsdp2Config()], ids=["single", "fsdp2"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_waits_for_the_device(model, precision, engine_config, tmp_path):
    assert run_loop(MODELS[model], engine_config, "cpu", precision, RefusesToWait, tmp_path) == NUM_STEPS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine_config", [SingleConfig(), Fsdp2Config()], ids=["single", "fsdp2"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_waits_for_a_gpu(model, engine_config, tmp_path):
    assert run_loop(MODELS[model], engine_config, "cuda", "bf16", ErrorIfCudaWaits, tmp_path) == NUM_STEPS


@pytest.mark.parametrize("wait", [torch.Tensor.item, torch.nonzero, bool, lambda x: x[x > 0]])
def test_the_watch_sees_what_waits(wait):
    with pytest.raises(AssertionError, match="waits"), RefusesToWait():
        wait(torch.ones(1))
