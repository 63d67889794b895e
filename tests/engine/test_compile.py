"""torch.compile of blocks, or of their groups as on a GPU: a graph of each kind to train, one more to evaluate, no
break, and nothing compiled again later."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from gmlp_scale.data.batch import IGNORED
from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import Fsdp2Config, SingleConfig, TrainConfig, ZeroConfig, build_engine, computing
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.errors import InputError
from gmlp_scale.models import build_model
from gmlp_scale.models.image_classifier import ImageBatch, ImageClassifier
from tests.engine.trained_engines import GMLP, SIZES, micro_batches_of, start_engine, train
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import FAMILIES, tiny_config

MODELS = {kind: tiny_config(kind, **SIZES | {"d_model": 16}) for kind in FAMILIES}


def _count_graphs(engine_config, recompute: str, kinds: Sequence[str], in_groups: bool) -> dict[str, list[int]]:
    """By model: graphs compiled so far after the first step, an evaluation, and more of both.

    in_groups: as on a GPU.
    """
    if in_groups:
        computing.compiled_modules = lambda model, device: model.groups
    # What dynamo traces is what counts; without a compiler behind it that takes a second.
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    graphs = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name in kinds:
            torch._dynamo.reset()
            counters.clear()
            engine = start_engine(world, MODELS[name], engine_config, compile=True, recompute=recompute)
            graphs[name] = []
            for step in range(3):
                train(engine, world, step, step + 1)
                graphs[name].append(counters["stats"]["unique_graphs"])
                engine.predict(micro_batches_of(9, world)[0])
                graphs[name].append(counters["stats"]["unique_graphs"])
            assert not counters["graph_break"], (name, dict(counters["graph_break"]))
            engine.close()
            if isinstance(engine_config, ZeroConfig):
                break  # DeepSpeed starts but once in a process
    return graphs


@pytest.mark.parametrize(
    "engine_config, recompute",
    [
        (SingleConfig(), "none"),
        (SingleConfig(), "selective"),
        (Fsdp2Config(blocks_per_group=2), "full"),
        (ZeroConfig(stage=2), "none"),
    ],
    ids=str,
)
def test_blocks_of_a_kind_share_one_graph_that_is_compiled_once(engine_config, recompute):
    graphs = run_ranks(_count_graphs, 1, engine_config, recompute, list(MODELS), False)[0]
    for name, after_each in graphs.items():
        num_kinds = 2 if MODELS[name].blocks_differ else 1
        assert after_each == [num_kinds, *[2 * num_kinds] * 5], name


@pytest.mark.parametrize(
    "engine_config, recompute, num_lengths",
    [
        (SingleConfig(), "selective", 1),  # all three blocks are one group
        (Fsdp2Config(blocks_per_group=2), "full", 2),  # two and one
        (ZeroConfig(stage=1), "none", 1),
    ],
    ids=str,
)
def test_groups_of_one_length_share_one_graph(engine_config, recompute, num_lengths):
    kinds = ["gmlp", "modern", "avey"]  # a group calls its blocks, which are alike or of two kinds
    graphs = run_ranks(_count_graphs, 1, engine_config, recompute, kinds, True)[0]
    for name, after_each in graphs.items():
        assert after_each == [num * num_lengths for num in (1, 2, 2, 2, 2, 2)], name


def _graphs_of_stochastic_depth() -> list[int]:
    computing.GRAPHS_OF_BLOCKS = 3
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    config = GMLP.model_copy(update={"num_blocks": 6, "spatial": "dense"})
    model = build_model(config, head=functools.partial(ImageClassifier, patch_size=4, survival_probability=0.8))
    train = TrainConfig(num_steps=1, global_batch_size=2, micro_batch_size=2)
    with start_world(60, "cpu") as world:
        engine = build_engine(model, world, engine=SingleConfig(), train=train, optimizer=AdamwConfig())
        images_B3HW, classes_B = torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.long)
        batch, graphs = ImageBatch(images_B3HW, classes_B, classes_B, torch.ones(2)), []
        engine.backward(engine.module(batch), is_last=True)
        graphs.append(counters["stats"]["unique_graphs"])
        engine.predict(batch)
        graphs.append(counters["stats"]["unique_graphs"])
        engine.close()
    return graphs


def test_blocks_of_stochastic_depth_are_all_compiled():
    assert run_ranks(_graphs_of_stochastic_depth, 1) == [[6, 7]]


def test_every_pass_through_a_model_of_cuda_graphs_marks_its_begin(monkeypatch):
    """Of the GPU's part this holds the wiring; the device is a stand-in, and nothing is compiled or recorded."""
    modes, begins, functions = [], [], []
    monkeypatch.setattr(torch, "compile", lambda function: functions.append(function.__name__) or function)
    monkeypatch.setattr(nn.Module, "compile", lambda block, mode, options: modes.append((mode, options)))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begins.append("begin"))
    engine = build_engine(
        build_model(GMLP),
        SimpleNamespace(size=1, rank=0, device=torch.device("meta")),
        engine=SingleConfig(),
        train=TrainConfig(num_steps=1, global_batch_size=4, micro_batch_size=2, compile="reduce-overhead"),
        optimizer=AdamwConfig(),
    )
    assert modes == [("reduce-overhead", None)] * SIZES["num_blocks"] and functions == ["row_losses"]
    batch = micro_batches_of(0, SimpleNamespace(size=1, rank=0))[0].to("meta")
    engine.backward(engine.module(batch), is_last=False)
    assert len(begins) == 1
    engine.predict(batch)
    assert len(begins) == 2


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiled_loss_is_the_plain_one_in_one_graph(precision):
    model = build_model(GMLP).to(precision)
    x_BMD = torch.randn(3, 5, SIZES["d_model"], dtype=precision, requires_grad=True)
    labels_BM = torch.randint(0, SIZES["vocab_size"], (3, 5))
    labels_BM[1, 2:] = labels_BM[2] = IGNORED
    results = []
    for row_losses in (model.row_losses, torch.compile(model.row_losses, backend="aot_eager", fullgraph=True)):
        losses_B = row_losses(x_BMD, labels_BM)
        results.append([losses_B, *torch.autograd.grad(losses_B.mean(), (x_BMD, model.head.weight))])
    assert results[0][0][2] == 0
    torch.testing.assert_close(results[1], results[0])


def _gradients_left(engine_config) -> list[str]:
    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, engine_config, "bf16")
        own = {_place(parameter.grad) for parameter in engine.module.parameters() if parameter.grad is not None}
        engine.backward(engine.module(micro_batches_of(0, world)[0]), is_last=False)
        gradients = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
        engine.close()
    return [name for name, grad in gradients.items() if grad is not None and _place(grad) not in own]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


WITH_CUDA_GRAPHS = [SingleConfig(), Fsdp2Config(blocks_per_group=2), ZeroConfig(stage=1), ZeroConfig(stage=2)]


@pytest.mark.parametrize("engine_config", WITH_CUDA_GRAPHS, ids=str)
def test_no_gradient_stays_in_memory_that_the_next_micro_batch_overwrites(engine_config):
    """CUDA graphs give their results the same memory every time, so an engine adds gradients up elsewhere."""
    assert run_ranks(_gradients_left, 1, engine_config) == [[]]


def _parameters_that_move(engine_config) -> set[str]:
    places, held = defaultdict(set), []

    def see_places(module: nn.Module, _) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            places[f"{names[module]}.{name}"].add(_place(parameter))
            held.append(torch.empty_like(parameter))  # takes memory that is free, so that nothing goes back there

    with start_world(60, "cpu", init_group=True) as world:
        engine = start_engine(world, GMLP, engine_config, "bf16")
        names = {module: name for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)}
        for module in names:
            module.register_forward_pre_hook(see_places)
        for step in range(3):
            train(engine, world, step, step + 1)
            engine.predict(micro_batches_of(9, world)[0])
        engine.close()
    return {name for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("engine_config", WITH_CUDA_GRAPHS, ids=str)
def test_parameters_stay_where_cuda_graphs_read_them(engine_config):
    num_ranks = 1 if isinstance(engine_config, SingleConfig) else 2
    assert run_ranks(_parameters_that_move, num_ranks, engine_config) == [set()] * num_ranks


def test_parameters_move_where_they_are_freed_after_the_forward_pass():
    moving = run_ranks(_parameters_that_move, 2, Fsdp2Config(reshard_after_forward=True))
    assert {"blocks.0.expand.weight", "blocks.0.project.weight"} <= moving[0] & moving[1]


def test_cuda_graphs_are_refused_where_the_device_turns_out_to_be_a_cpu():
    with start_world(60, "cpu") as world, pytest.raises(InputError, match="there is no GPU here"):
        start_engine(world, GMLP, SingleConfig(), precision="bf16", compile="reduce-overhead")
