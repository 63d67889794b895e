"""Every engine, on any number of ranks, gives the losses, gradient norms and predictions of one process."""

import itertools
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import EngineConfig
from gmlp_scale.engine.adamw import decayed_names
from gmlp_scale.models import build_model, heads
from gmlp_scale.models.gmlp import SpatialGatingUnit
from tests.engine.trained_engines import (
    AMLP,
    AVEY,
    BERT,
    ENGINES,
    GMLP,
    MODERN,
    OPTIMIZER,
    OPTIONS,
    SHARDED,
    SHARDED_BUT_ZERO_3,
    SINGLE,
    SIZES,
    micro_batches_of,
    start_engine,
    train,
)
from tests.gloo_ranks import run_ranks

MODELS = {"gmlp": GMLP, "amlp": AMLP, "bert": BERT, "modern": MODERN, "avey": AVEY}
CASES = [
    *((model, "float32") for model in MODELS), ("amlp", "recompute"),
    ("amlp", "muon"), ("modern", "muon"), ("avey", "muon"),
]  # fmt: skip
BF16 = [("amlp", "bf16"), ("bert", "bf16"), ("modern", "bf16"), ("avey", "bf16")]


def _train_each(cases: list, engine_configs: dict) -> dict:
    """Losses, norms, predictions and whole weights on this rank, for every case and engine."""
    results = {}
    with start_world(60, "cpu", init_group=True) as world:
        for (model, option), name in itertools.product(cases, engine_configs):
            # With "recompute" the head works in chunks too, of one row of 4 masked positions.
            heads.MAX_LOGITS_PER_CHUNK = 4 * SIZES["vocab_size"] if option == "recompute" else 2**26
            engine = start_engine(world, MODELS[model], engine_configs[name], **OPTIONS[option])
            first = train(engine, world, 0, 2)
            # In the middle, since the steps after it must not notice.
            predictions = engine.predict(micro_batches_of(99, world)[0])
            later = train(engine, world, 2, 6)
            results[model, option, name] = {
                "losses": first.losses + later.losses,
                "norms": first.norms + later.norms,
                "predictions": predictions,
                "weights": dict(engine.full_weights()),
                "computes with": _vectors_of(engine.module),
            }
            engine.close()
    return results


def _vectors_of(module: nn.Module) -> dict[str, Tensor]:
    """The values of LayerNorms' gains and biases, w and b that `module` computes with."""
    vectors = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.LayerNorm | nn.RMSNorm | SpatialGatingUnit):
            for attribute in ("weight", "bias"):
                if (vector := getattr(part, attribute, None)) is not None:
                    vectors[f"{name}.{attribute}".removeprefix("module.")] = vector.detach().clone()
    return vectors


@pytest.fixture(scope="module")
def single() -> dict:
    return run_ranks(_train_each, 1, CASES + BF16, SINGLE)[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return run_ranks(_train_each, 2, CASES + BF16, SHARDED)


def _assert_close(run: dict, expected: dict) -> None:
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert run["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    torch.testing.assert_close(run["predictions"], expected["predictions"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run["weights"], expected["weights"], rtol=1e-4, atol=1e-5)
    assert not run["predictions"].requires_grad


@pytest.mark.parametrize(("model", "option"), CASES)
@pytest.mark.parametrize("engine", SHARDED)
def test_engines_agree_in_float32_on_two_ranks(single, two_ranks, model, option, engine):
    expected = single[model, "muon" if option == "muon" else "float32", "single"]
    assert min(expected["norms"]) > OPTIMIZER.gradient_clipping  # so every step is clipped
    _assert_close(two_ranks[0][model, option, engine], expected)


# Selective recomputation is in processes of its own: what ZeRO-3 makes of torch's linear function, which the recipe
# refuses, stays in one.
@pytest.mark.parametrize(
    ("world_size", "option", "engines"), [(2, "selective", SHARDED_BUT_ZERO_3), (1, "float32", SHARDED)]
)
def test_neither_selective_recomputation_nor_one_rank_alone_changes_anything(single, world_size, option, engines):
    for run in run_ranks(_train_each, world_size, [("amlp", option)], engines)[0].values():
        _assert_close(run, single["amlp", "float32", "single"])


def _losses_and_norms_in_float64(model_config) -> tuple[list[float], list[float]]:
    """Of the same steps, without an engine."""
    model = build_model(model_config)
    model.double()
    decayed = decayed_names(model)
    decays = [(parameter, OPTIMIZER.weight_decay * (name in decayed)) for name, parameter in model.named_parameters()]
    groups = [{"params": [parameter], "weight_decay": decay} for parameter, decay in decays]
    adamw = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses, norms = [], []
    for step in range(6):
        micro_batches = micro_batches_of(step, SimpleNamespace(rank=0, size=1))
        loss = sum(model(batch) for batch in micro_batches) / len(micro_batches)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clipping).item())
        for group in adamw.param_groups:
            group["lr"] = 0.01 / (1 + step)
        adamw.step()
        adamw.zero_grad()
    return losses, norms


@pytest.mark.parametrize("model", [model for model, _ in BF16])
def test_engines_in_bf16_stay_near_float64(single, two_ranks, model):
    losses, norms = _losses_and_norms_in_float64(MODELS[model])
    exact = single[model, "float32", "single"]
    assert exact["losses"] == pytest.approx(losses, rel=1e-6) and exact["norms"] == pytest.approx(norms, rel=1e-5)
    for engine in ["single", *SHARDED]:
        run = (single if engine == "single" else two_ranks[0])[model, "bf16", engine]
        assert run["losses"] != exact["losses"], engine
        assert run["losses"] == pytest.approx(losses, rel=5e-4), engine
        assert run["norms"] == pytest.approx(norms, rel=2e-2), engine
        torch.testing.assert_close(run["weights"], single[model, "bf16", "single"]["weights"], rtol=0, atol=3e-3)


@pytest.mark.parametrize(("model", "option"), BF16)
def test_engines_in_bf16_compute_with_the_float32_values_of_vectors(single, two_ranks, model, option):
    for engine in ["single", *SHARDED]:
        ranks = [single] if engine == "single" else two_ranks
        weights = ranks[0][model, option, engine]["weights"]
        assert all(weight.dtype == torch.float32 for weight in weights.values()), engine
        for rank in ranks:
            vectors = rank[model, option, engine]["computes with"]
            assert vectors and all(torch.equal(vectors[name], weights[name]) for name in vectors), engine


def test_ranks_agree_and_the_main_one_alone_has_the_whole_weights(two_ranks):
    for key, run in two_ranks[0].items():
        other = two_ranks[1][key]
        assert (run["losses"], run["norms"]) == (other["losses"], other["norms"])
        assert run["weights"] and not other["weights"]


def test_every_engine_is_in_the_table():
    assert {type(config) for config in ENGINES.values()} == set(get_args(get_args(EngineConfig)[0]))
