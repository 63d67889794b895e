"""Avey's layers against plain loops, their order, their start, and what they know of positions."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from gmlp_scale.models import AveyConfig, build_model
from gmlp_scale.models.avey import ranking, similarities
from gmlp_scale.models.backbone import Backbone
from tests.models.every_kind import check_gradients, perturb, random_batch, tiny_config, tiny_model
from tests.models.float64_layers import linear, numbers


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return np.array([token / math.sqrt(sum(value**2 for value in token) / len(token) + 1e-12) * gain for token in x])


def layer_by_loops(p: dict[str, np.ndarray], x: np.ndarray, d_gate: int) -> np.ndarray:
    """One row. A layer is static if it has a W."""
    m = len(x)
    z = linear(rms_norm(x, p["norm.weight"]), p["expand.weight"], p["expand.bias"])
    z = np.array([[max(value, 0.0) ** 2 for value in token] for token in z])
    mixed, gate, bypass = z[:, :d_gate], z[:, d_gate : 2 * d_gate], z[:, 2 * d_gate :]
    weights = np.empty((m, m))
    for i in range(m):
        for j in range(m):
            if "spatial" in p:
                W = p["spatial"]
                weights[i, j] = W[i, j] if W.ndim == 2 else W[len(W) // 2 + j - i]
            else:
                lengths = [math.sqrt(sum(value**2 for value in mixed[k]) + 1e-12) for k in (i, j)]
                weights[i, j] = sum(mixed[i] * mixed[j]) / math.prod(lengths)
        if "spatial" not in p:
            weights[i] /= sum(weights[i]) + 1e-12
    fused = [[*(sum(weights[i, j] * mixed[j] for j in range(m)) * gate[i]), *bypass[i]] for i in range(m)]
    return x + linear(np.array(fused), p["project.weight"], p["project.bias"])


@pytest.mark.parametrize("num_positions", [12, 5])
@pytest.mark.parametrize("mixed_share", [0.5, 1.0, 0.2])
@pytest.mark.parametrize("kind", ["avey", "avey-static", "avey-dynamic"])
def test_layer_is_that_of_the_equations(kind, mixed_share, num_positions):
    config = tiny_config(kind, mixed_share=mixed_share)
    block = perturb(build_model(config).blocks[0].double())
    x_BND = torch.randn(2, num_positions, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    d_gate = {0.5: 8, 1.0: 16, 0.2: 3}[mixed_share]
    expected = [layer_by_loops(numbers(block), row, d_gate) for row in x_BND.numpy()]
    np.testing.assert_allclose(block(x_BND).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_model_is_that_of_the_equations_with_a_static_layer_first():
    model = perturb(tiny_model("avey", num_blocks=3), scale=0.1)
    batch = random_batch(num_rows=2)
    p = {name: array.astype(np.float64) for name, array in numbers(model).items()}
    blocks = [{name[9:]: array for name, array in p.items() if name.startswith(f"blocks.{i}.")} for i in range(3)]
    assert ["spatial" in block for block in blocks] == [True, False, True]
    for row, ids_N in enumerate(batch.token_ids_BN.tolist()):
        x = p["embedding.weight"][ids_N]
        for block in blocks:
            x = layer_by_loops(block, x, d_gate=8)
        masked = rms_norm(x[batch.masked_positions_BM[row].tolist()], p["norm.weight"])
        found = model.predict(batch)[row].detach().numpy()
        np.testing.assert_allclose(found, masked @ p["embedding.weight"].T, rtol=1e-5, atol=1e-5)


def ranked_by_loops(matrix: np.ndarray, x: np.ndarray, k: int) -> np.ndarray:
    """The ranker on one row, whose last chunk may not be full."""
    S = len(matrix)
    padded = np.concatenate([x, np.zeros((-len(x) % S, x.shape[1]))])
    chunks = [padded[start : start + S] for start in range(0, len(x), S)]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return sum(a * b) / (math.sqrt(sum(a * a) * sum(b * b)) or 1.0)

    results = []
    for number, own in enumerate(chunks):
        score = {i: sum(max(cosine(a, b) for b in chunks[i]) for a in own) for i in range(number)}
        best = sorted(score, key=score.get, reverse=True)[:k]
        ranked = [chunks[i] * score[i] / score[best[-1]] for i in best]
        empty = [np.zeros_like(own)] * (k - len(best))
        results.append(own + matrix @ np.concatenate([*empty, *ranked, own]))
    return np.concatenate(results)[: len(x)]


@pytest.mark.parametrize("num_positions", [18, 10, 3, 2])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_ranker_brings_each_chunk_the_best_of_those_before(num_positions, k):
    model = tiny_model("avey-ranked", d_model=8, sequence_length=18, ranked_chunks=k)
    perturb(model.blocks.double(), scale=0.5)
    x_BND = torch.randn(2, num_positions, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = model.blocks[1](model.blocks[0](x_BND)).detach().numpy()
    for row, x in enumerate(x_BND.numpy()):
        x = ranked_by_loops(numbers(model.blocks[0])["ranker.map"], x, k)
        for block in model.blocks:
            chunks = [x[start : start + 3] for start in range(0, len(x), 3)]
            x = np.concatenate([layer_by_loops(numbers(block), chunk, d_gate=8) for chunk in chunks])
        np.testing.assert_allclose(found[row], x, rtol=1e-10, atol=1e-10)


def test_ranker_never_takes_a_chunk_of_padding():
    x_BND = torch.randn(1, 12, 8, generator=torch.Generator().manual_seed(3)) + 1
    is_token_BN = torch.tensor([[True] * 3 + [False] * 3 + [True] * 6])
    (choice_CKC,) = ranking(x_BND * is_token_BN[:, :, None], is_token_BN, num_chunks=4, k=2)
    taken = [[places.nonzero()[:, 0].tolist() for places in chunk] for chunk in choice_CKC]
    assert taken[0] == [[], []] and taken[2] == [[], [0]] and sorted(taken[3]) == [[0], [2]]
    assert choice_CKC.max() < 2  # one lowest score of the two


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_length": 3}, "chunk_length and ranked_chunks go together: set both or neither"),
        ({"ranked_chunks": 2}, "chunk_length and ranked_chunks go together: set both or neither"),
        ({"chunk_length": 5, "ranked_chunks": 1}, "sequence_length is 12, chunk_length 5 and ranked_chunks 1; needed"),
        ({"chunk_length": 4, "ranked_chunks": 3}, "a multiple of chunk_length with more chunks than ranked_chunks"),
    ],
)
def test_chunks_that_do_not_fill_the_row_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        tiny_config("avey", **fields)


@pytest.mark.parametrize("kind", ["avey", "avey-static", "avey-dynamic", "avey-ranked"])
def test_gradients_are_right(kind):
    chunks = {"chunk_length": 1} if kind == "avey-ranked" else {}
    block = tiny_model(kind, d_model=4, d_ffn=8, sequence_length=3, **chunks).blocks[0].double()
    check_gradients(perturb(block, scale=0.6), d_model=4)


def test_dynamic_layers_alone_do_not_know_the_order():
    model = perturb(build_model(tiny_config("avey-dynamic"), head=Backbone).double())
    token_ids_BN, order = torch.arange(12)[None], torch.randperm(12, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(model.encode(token_ids_BN[:, order]), model.encode(token_ids_BN)[:, order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_without_any_feature_are_alike_to_none(dtype):
    v_BNG = torch.tensor([[[3.0, 4.0], [0.0, 0.0], [4.0, 3.0]]], dtype=dtype, requires_grad=True)
    weight_BNN = similarities(v_BNG)
    weight_BNN.sum().backward()
    assert weight_BNN.dtype == dtype and v_BNG.grad.isfinite().all()
    expected = torch.tensor([[1.0, 0.0, 0.96], [0.0, 0.0, 0.0], [0.96, 0.0, 1.0]]) / 1.96
    tolerance = 0.01 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(weight_BNN[0], expected.to(dtype), rtol=tolerance, atol=0)


@pytest.mark.parametrize("spatial", ["dense", "toeplitz"])
def test_a_static_w_starts_by_glorots_rule(spatial):
    sizes = {"num_blocks": 1, "d_model": 8, "d_ffn": 16, "sequence_length": 512, "vocab_size": 9}
    (block,) = build_model(AveyConfig(**sizes, spatial=spatial)).blocks
    assert block.spatial.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.05)


@pytest.mark.parametrize("num_blocks", [1, 3, 4])
@pytest.mark.parametrize("kind", ["avey", "avey-ranked"])
def test_multiply_adds_are_the_mean_over_all_layers_and_the_ranker(kind, num_blocks):
    model = tiny_model(kind, num_blocks=num_blocks, sequence_length=15)
    batch = random_batch(num_rows=2, num_positions=15)
    with FlopCounterMode(display=False) as counter:
        model.predict(batch)
    assert 2 * model.flops_per_sample(num_masked=3) == counter.get_total_flops()


@pytest.mark.parametrize(("d_ffn", "mixed_share", "d_gate"), [(3072, 0.5, 768), (30, 0.5, 8), (10, 0.1, 1), (6, 1, 3)])
def test_an_odd_share_becomes_the_next_even_width(d_ffn, mixed_share, d_gate):
    assert tiny_config("avey", d_ffn=d_ffn, mixed_share=mixed_share).d_gate == d_gate


@pytest.mark.parametrize(("d_ffn", "mixed_share", "found"), [(7, 1, 8), (8, 0.1, 0), (8, 1.5, 12)])
def test_a_share_that_mixes_nothing_or_more_than_there_is_is_refused(d_ffn, mixed_share, found):
    message = rf"d_ffn is {d_ffn} and mixed_share {mixed_share:.1f}: {found} channels would be mixed; needed: from 2 to"
    with pytest.raises(ValidationError, match=message):
        tiny_config("avey", d_ffn=d_ffn, mixed_share=mixed_share)
