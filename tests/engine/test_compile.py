"""torch.compile of the blocks: one graph to train, one more to evaluate, no break, and nothing compiled again later."""

import functools

import pytest
import torch
from ranks import run_ranks
from tiny_runs import AMLP, GMLP, SIZES, micro_batches_of, start_engine, train
from torch import nn
from torch._dynamo.utils import counters

from gmlp_scale.engine import Fsdp2Config, SingleConfig, ZeroConfig
from gmlp_scale.models import MixerConfig, TransformerConfig
from gmlp_scale.world import start_world

MODELS = {
    "gmlp": GMLP,
    "amlp": AMLP,
    "bert": TransformerConfig(**SIZES, num_heads=3, positions="relative"),
    "mixer": MixerConfig(**SIZES, d_spatial=8),
}


def _count_graphs(engine_config, recompute: str) -> dict[str, list[int]]:
    """By model: graphs compiled so far after the first step, an evaluation, and more of both."""
    # What dynamo traces is what counts; without a compiler behind it that takes a second.
    nn.Module.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    graphs = {}
    with start_world(60, "cpu", init_group=True) as world:
        for name, model_config in MODELS.items():
            torch._dynamo.reset()
            counters.clear()
            engine = start_engine(world, model_config, engine_config, compile=True, recompute=recompute)
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
        (SingleConfig(), "full"),
        (Fsdp2Config(blocks_per_group=2), "none"),
        (ZeroConfig(stage=2), "none"),
    ],
    ids=str,
)
def test_blocks_share_one_graph_that_is_compiled_once(engine_config, recompute):
    graphs = run_ranks(_count_graphs, 1, engine_config, recompute)[0]
    for name, after_each in graphs.items():
        assert after_each == [1, 2, 2, 2, 2, 2], name
