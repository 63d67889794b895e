"""Attention in bfloat16 on a CPU, which has a path of its own."""

import copy

import pytest
import torch

from gmlp_scale.models.attention import SelfAttention
from gmlp_scale.models.transformer import RelativeBias


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("variant", ["plain", "causal", "biased"])
def test_in_bfloat16_on_a_cpu_it_is_torchs_attention(variant, is_padded):
    torch.manual_seed(5)
    bias = RelativeBias(4) if variant == "biased" else None
    attention = SelfAttention(64, 4, 0.0, relative_bias=bias, causal=variant == "causal").bfloat16()
    x_BND = torch.randn(3, 40, 64).bfloat16()
    is_token_BN = torch.arange(40) < torch.tensor([[40], [7], [1]]) if is_padded else None

    def results(module, x_BND):
        x_BND = x_BND.clone().requires_grad_()
        y_BND = module(x_BND, is_token_BN)
        y_BND.float().square().sum().backward()
        return [y_BND, x_BND.grad, *(parameter.grad for parameter in module.parameters())]

    exact = results(copy.deepcopy(attention).float(), x_BND.float())  # by torch's fused kernel
    for found, needed in zip(results(attention, x_BND), exact, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), needed, rtol=0.03, atol=0.02 * needed.abs().max().item())


def test_dropout_drops_weights_in_training_alone():
    attention = SelfAttention(32, 2, 0.5).bfloat16()
    x_BND = torch.randn(2, 9, 32).bfloat16()
    assert not torch.equal(attention(x_BND), attention(x_BND))
    attention.eval()
    assert torch.equal(attention(x_BND), attention(x_BND))
