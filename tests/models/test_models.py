"""Every model keeps the contract in gmlp_scale/models/__init__.py, whatever its blocks are."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

from gmlp_scale.data.batch import IGNORED, PAD_ID, MaskedBatch
from gmlp_scale.models import ModelConfig, build_model, heads
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.gmlp import Gating
from tests.models.every_kind import CAUSAL, KINDS, READS_PADDING, SIZES, perturb, random_batch, tiny_config, tiny_model

ALL = pytest.mark.parametrize("kind", KINDS)


def test_the_table_of_these_tests_holds_every_block_family():
    assert {type(tiny_config(kind)) for kind in KINDS} == set(get_args(get_args(ModelConfig)[0]))


def gradients(model, batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(batch)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@ALL
def test_loss_is_the_mean_of_the_means_of_rows(kind):
    model, batch = tiny_model(kind).double(), random_batch()
    rows = []
    for logits_MV, labels_M in zip(model.predict(batch).tolist(), batch.labels_BM.tolist(), strict=True):
        losses = [
            math.log(sum(math.exp(value) for value in logits)) - logits[label]
            for logits, label in zip(logits_MV, labels_M, strict=True)
            if label != IGNORED
        ]
        rows.append(sum(losses) / len(losses))
    loss = model(batch)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert math.isclose(loss.item(), sum(rows) / len(rows), rel_tol=1e-6)


def test_a_row_without_valid_positions_counts_as_zero():
    model, batch = tiny_model("gmlp"), random_batch()
    labels_BM = batch.labels_BM.clone()
    labels_BM[0] = IGNORED
    batch = MaskedBatch(batch.token_ids_BN, batch.masked_positions_BM, labels_BM)
    rest = MaskedBatch(batch.token_ids_BN[1:], batch.masked_positions_BM[1:], labels_BM[1:])
    assert torch.allclose(model(batch), model(rest) * 3 / 4)


@ALL
def test_logits_are_those_of_the_masked_positions(kind):
    model, batch = tiny_model(kind), random_batch()
    logits_BMV = model.predict(batch)
    states_BND = model.norm(model.encode(batch.token_ids_BN))
    for row_index, positions_M in enumerate(batch.masked_positions_BM):
        for slot, position in enumerate(positions_M):
            expected_V = model.embedding.weight @ states_BND[row_index, position]
            torch.testing.assert_close(logits_BMV[row_index, slot], expected_V, rtol=1e-5, atol=1e-5)


def test_chunks_of_the_head_change_nothing(monkeypatch):
    model, batch = tiny_model("amlp"), random_batch(num_rows=5)
    loss, expected = gradients(model, batch)
    monkeypatch.setattr(heads, "MAX_LOGITS_PER_CHUNK", 2 * 3 * 40)  # chunks of 2, 2 and 1 rows
    chunked_loss, found = gradients(model, batch)
    torch.testing.assert_close(chunked_loss, loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7, msg=name)


@ALL
def test_every_parameter_gets_a_gradient(kind):
    model = perturb(tiny_model(kind))
    for name, gradient in gradients(model, random_batch())[1].items():
        assert gradient is not None and gradient.abs().max() > 0, name


@ALL
def test_looks_in_both_directions(kind):
    model = perturb(tiny_model(kind).double())
    token_ids_BN = random_batch().token_ids_BN[:1]
    states_ND = model.encode(token_ids_BN)[0]
    first = 9 if kind == "avey-ranked" else 0  # whose chunks do not look at later ones
    for changed, seen in ((-1, first), (0, -1)):
        other_BN = token_ids_BN.clone()
        other_BN[0, changed] = token_ids_BN[0, changed] % 39 + 1
        assert (model.encode(other_BN)[0, seen] - states_ND[seen]).abs().max() > 1e-6


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "avey-dynamic"])
def test_knows_the_order_of_the_tokens(kind):
    model = perturb(tiny_model(kind).double())
    token_ids_BN = torch.arange(12).unsqueeze(0)
    swapped_BN = token_ids_BN.clone()
    swapped_BN[0, [2, 9]] = token_ids_BN[0, [9, 2]]
    assert (model.encode(swapped_BN)[0, 5] - model.encode(token_ids_BN)[0, 5]).abs().max() > 1e-6


@ALL
def test_shorter_rows_are_those_of_a_model_made_for_them(kind):
    long, short = tiny_model(kind), tiny_model(kind, sequence_length=9)
    perturb(long)
    cut = {}
    for name, like in short.state_dict().items():
        tensor = long.state_dict()[name]
        for dim, (size, wanted) in enumerate(zip(tensor.shape, like.shape, strict=True)):
            offsets = name.endswith(("gating.weight", ".spatial")) and tensor.ndim == 1  # the central 2m - 1 of 2n - 1
            tensor = tensor.narrow(dim, (size - wanted) // 2 if offsets else 0, wanted)
        cut[name] = tensor
    short.load_state_dict(cut)
    token_ids_BN = random_batch(num_positions=9).token_ids_BN
    torch.testing.assert_close(long.encode(token_ids_BN), short.encode(token_ids_BN), rtol=1e-5, atol=1e-5)


LENGTHS = (8, 12, 3, 0)
"""Tokens of each row; the last one holds padding alone."""
VARIANTS = [
    *((kind, {}, False) for kind in KINDS),
    *((kind, {}, True) for kind in CAUSAL),
    *(("gmlp", {"gating": gating, "spatial": "dense"}, False) for gating in get_args(Gating)),
    ("amlp", {"spatial": "dense"}, False),
]


def padded_rows(lengths: Sequence[int] = LENGTHS) -> torch.Tensor:
    token_ids_BN = random_batch(num_rows=len(lengths)).token_ids_BN
    for row, length in zip(token_ids_BN, lengths, strict=True):
        row[length:] = PAD_ID
    return token_ids_BN


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("num_positions", [12, 9])
@pytest.mark.parametrize(("kind", "changes", "causal"), VARIANTS)
def test_a_text_is_the_same_with_any_padding_and_without(kind, changes, causal, num_positions, dtype, tolerance):
    model = perturb(build_model(tiny_config(kind, **changes), head=Backbone, causal=causal).to(dtype))
    token_ids_BN = padded_rows()[:, :num_positions]
    states_BND = model.encode(token_ids_BN)
    assert states_BND.isfinite().all()
    for ids_N, states_ND, length in zip(token_ids_BN, states_BND, LENGTHS, strict=True):
        if length:
            alone_ND = model.encode(ids_N[None, :length], padded=False)[0]
            torch.testing.assert_close(states_ND[:length], alone_ND, rtol=tolerance, atol=tolerance)
    seen_BND = model.encode(token_ids_BN, padded=False)
    assert ((seen_BND[0, :8] - states_BND[0, :8]).abs().max() > 1e-6) != causal  # a causal model never looks there
    if kind != "bert-relative-only":  # which divides by a sum of weights that may be off by rounding
        assert torch.equal(model.encode(token_ids_BN[1:2]), model.encode(token_ids_BN[1:2], padded=False))


@pytest.mark.parametrize("kind", READS_PADDING)
def test_a_model_without_the_field_reads_padding_as_before(kind):
    model = perturb(build_model(type(tiny_config(kind))(**SIZES | KINDS[kind])).double())
    token_ids_BN = padded_rows()
    states_BND = model.encode(token_ids_BN)
    assert torch.equal(states_BND, model.encode(token_ids_BN, padded=False))
    with torch.no_grad():
        model.embedding.weight[PAD_ID] *= -1
    assert (model.encode(token_ids_BN)[0, :8] - states_BND[0, :8]).abs().max() > 1e-6


@ALL
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_padding_is_masked_in_pretraining_where_the_batch_says_so(kind, recompute):
    model = perturb(tiny_model(kind).double())
    token_ids_BN = padded_rows([7, 7, 7, 7])
    batch = replace(random_batch(), token_ids_BN=token_ids_BN, masked_positions_BM=torch.tensor([[0, 2, 6]] * 4))
    loss, expected = gradients(model, replace(batch, token_ids_BN=token_ids_BN[:, :7], padded=False))
    model.set_recompute(recompute)
    same_loss, found = gradients(model, batch)
    torch.testing.assert_close(same_loss, loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-9, msg=name)
    assert not torch.isclose(model(batch), model(replace(batch, padded=False)))


@ALL
def test_a_row_of_padding_alone_has_finite_gradients(kind):
    model = perturb(tiny_model(kind))
    _, found = gradients(model, replace(random_batch(), token_ids_BN=padded_rows()))
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_longer_rows_are_refused():
    with pytest.raises(ValueError, match=r"hold 13 tokens but the model was made for at most 12.*sequence_length=13"):
        tiny_model("gmlp").encode(torch.ones(1, 13, dtype=torch.int64))


@ALL
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_gives_the_same_gradients(kind, recompute):
    model, batch = tiny_model(kind), random_batch()
    perturb(model)
    calls = []
    norms = (torch.nn.LayerNorm, torch.nn.RMSNorm)
    norm = next(module for module in model.blocks[0].modules() if isinstance(module, norms))
    norm.register_forward_pre_hook(lambda *_: calls.append(1))
    loss, expected = gradients(model, batch)
    model.set_recompute(recompute)
    recomputed_loss, found = gradients(model, batch)
    assert len(calls) == 3  # once, then once forward and once backward
    assert torch.equal(recomputed_loss, loss)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@ALL
def test_bfloat16_is_close_to_float32(kind):
    model, batch = tiny_model(kind, d_model=64, d_ffn=128), random_batch()
    perturb(model, scale=0.05)
    loss, expected = gradients(model, batch)
    low_loss, found = gradients(copy.deepcopy(model).bfloat16(), batch)
    assert low_loss.dtype == torch.float32 and math.isclose(low_loss.item(), loss.item(), rel_tol=2e-3)
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    has_relu = kind in ("mlp-attention", "dot-product") or kind.startswith("avey")
    allowed = 0.12 if has_relu else 0.03  # rounding moves inputs of relu over its edge
    for name in expected:
        assert found[name].dtype == torch.bfloat16
        error = (found[name].float() - expected[name]).norm()
        # A shift of the input of LayerNorm or softmax changes nothing, so its gradient is zero except for rounding.
        assert error < allowed * expected[name].norm() or expected[name].norm() < 1e-5 * whole, name


@ALL
def test_initial_weights_follow_from_the_seed_alone(kind):
    first, same, other = tiny_model(kind), tiny_model(kind), tiny_model(kind, seed=1)
    for parameter in same.bfloat16().parameters():
        parameter.data.fill_(math.nan)  # what init_weights passes over stays so
    same.init_weights(torch.Generator().manual_seed(0))
    for (name, parameter), low, different in zip(
        first.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(parameter.bfloat16(), low), name
        assert torch.equal(parameter, different) == (parameter.std() == 0), name


@ALL
def test_initial_weights_are_those_of_the_table(kind):
    model = tiny_model(kind, d_model=64, d_ffn=256)
    for name, module in model.named_modules():
        match module:
            case torch.nn.Linear() | torch.nn.Embedding() if module.weight.numel() > 1000:
                assert math.isclose(module.weight.std().item(), 0.02, rel_tol=0.1), name
        match module:
            case torch.nn.Linear() if module.bias is not None:
                assert not module.bias.any(), name
            case torch.nn.LayerNorm() | torch.nn.RMSNorm():
                bias = getattr(module, "bias", None)
                assert (module.weight == 1).all() and (bias is None or not bias.any()), name


@ALL
def test_output_matrix_is_the_embedding(kind):
    model = tiny_model(kind)
    names = [name for name, _ in model.named_parameters()]
    assert model.head.weight is model.embedding.weight
    assert names.count("embedding.weight") == 1 and "head.weight" not in names


def test_blocks_compile_without_a_break():
    model, batch = tiny_model("amlp", num_blocks=1), random_batch()
    perturb(model)
    loss, expected = gradients(model, batch)
    model.blocks[0].compile(fullgraph=True)
    compiled_loss, found = gradients(model, batch)
    torch.testing.assert_close(compiled_loss, loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@ALL
def test_one_graph_serves_texts_of_all_lengths(kind):
    torch.compiler.reset()  # so that torch's limit of graphs does not count those of other models
    model, graphs = perturb(tiny_model(kind)).eval(), []
    compiled = torch.compile(
        model.encode, dynamic=True, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    with torch.no_grad():
        for num_positions in (5, 7, 9, 11, 12):
            token_ids_BN = padded_rows()[:3, :num_positions].contiguous()
            assert torch.equal(compiled(token_ids_BN), model.encode(token_ids_BN))
    # MLP-Attention's scores are one block of memory at the full length only, for which torch writes another graph.
    assert len(graphs) == (2 if kind in ("mlp-attention", "avey-ranked") else 1)
