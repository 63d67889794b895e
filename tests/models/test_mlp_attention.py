"""MLP-Attention against a plain loop over positions, attention weights of every family, and causal blocks."""

import pytest
import torch

from gmlp_scale.models import build_model
from gmlp_scale.models.mlp_attention import MlpAttention
from gmlp_scale.models.task_heads import NextTokenBatch, NextTokenModel
from tests.models.every_kind import CAUSAL, TRANSFORMERS, perturb, tiny_config, tiny_model

N = 12


def causal_model(kind: str, dropout: float = 0.0, **changes) -> NextTokenModel:
    model = build_model(tiny_config(kind, **changes), head=NextTokenModel, causal=True, dropout=dropout)
    return perturb(model).double()


@pytest.fixture
def ids_BN():
    return torch.randint(0, 40, (2, N), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("num_positions", [N, 7, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_score_j_is_of_absolute_position_j_at_every_length(causal, num_positions):
    """The public code fails for rows that are shorter than the block size."""
    attention = MlpAttention(tiny_config("mlp-attention"), dropout=0.0, causal=causal)
    torch.nn.init.normal_(attention.scores_HSN)
    x_BND = torch.randn(2, num_positions, 16)
    heads = []
    for head in range(2):
        hidden = slice(head * 6, head * 6 + 6)
        value = slice(head * 8, head * 8 + 8)
        v_BNK = x_BND @ attention.value.weight[value].T
        rows = []
        for i in range(num_positions):
            s_BS = torch.relu(x_BND[:, i] @ attention.hidden.weight[hidden].T + attention.hidden.bias[hidden])
            seen = i + 1 if causal else num_positions
            scores = torch.stack([s_BS @ attention.scores_HSN[head, :, j] for j in range(seen)], dim=-1)
            rows.append((scores.softmax(-1).unsqueeze(-1) * v_BNK[:, :seen]).sum(1))
        heads.append(torch.stack(rows, dim=1))
    expected = attention.out(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x_BND), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", CAUSAL)
def test_no_position_sees_a_later_one(kind, ids_BN):
    model = causal_model(kind)
    logits = model.predict(NextTokenBatch(ids_BN, ids_BN))
    changed = ids_BN.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 40
    difference_N = (model.predict(NextTokenBatch(changed, changed)) - logits).abs().amax(dim=(0, 2))
    assert (difference_N[:5] == 0).all() and (difference_N[5:] > 0).all()


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_first_positions_of_a_row_are_a_shorter_row(kind, ids_BN):
    model = causal_model(kind)
    whole = model.predict(NextTokenBatch(ids_BN, ids_BN))
    short = model.predict(NextTokenBatch(ids_BN[:, :5], ids_BN[:, :5]))
    torch.testing.assert_close(short, whole[:, :5].contiguous())


CASES = [(kind, causal, False) for kind in ("mlp-attention", "dot-product", "amlp") for causal in (True, False)]
CASES += [(kind, False, is_padded) for kind in TRANSFORMERS for is_padded in (True, False)]


@pytest.mark.parametrize(("kind", "causal", "is_padded"), CASES)
def test_attention_weights_are_those_of_the_attention(kind, causal, is_padded):
    block = perturb((causal_model(kind) if causal else tiny_model(kind).double()).blocks[0])
    x_BND = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    padding_mask = [torch.arange(7) < torch.tensor([[7], [4]])] if is_padded else []
    attention, y_BND = block.attention, (block.norm if kind == "amlp" else block.attention_norm)(x_BND)
    has_keys = hasattr(attention, "qkv")
    v_BND = attention.qkv(y_BND).chunk(3, dim=-1)[2] if has_keys else attention.value(y_BND)
    weights_BHNN = block.attention_weights(x_BND, *padding_mask).double()
    v_BNHK = v_BND.unflatten(-1, (weights_BHNN.shape[1], -1))
    attended_BND = torch.einsum("bhij,bjhk->bihk", weights_BHNN, v_BNHK).flatten(2)
    torch.testing.assert_close(attention.out(attended_BND), attention(y_BND, *padding_mask), rtol=1e-5, atol=1e-5)


def test_loss_is_the_mean_over_positions(ids_BN):
    model, next_BN = causal_model("gmlp"), ids_BN.roll(-1, dims=1)
    logits_BNV = model.predict(NextTokenBatch(ids_BN, next_BN))
    log_p = logits_BNV.log_softmax(-1)
    expected = -sum(log_p[row, i, next_BN[row, i]] for row in range(2) for i in range(N)) / (2 * N)
    torch.testing.assert_close(model(NextTokenBatch(ids_BN, next_BN)), expected)


@pytest.mark.parametrize("kind", ["mlp-attention", "dot-product", "amlp"])
def test_recomputing_with_dropout_draws_the_same_numbers(kind, ids_BN):
    gradients = []
    for recompute in ("none", "full"):
        model = causal_model(kind, dropout=0.5)
        model.set_recompute(recompute)
        torch.manual_seed(0)
        model(NextTokenBatch(ids_BN, ids_BN)).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)
