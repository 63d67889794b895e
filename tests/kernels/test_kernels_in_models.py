"""Blocks give the same with either value of model.kernels, at any length, recomputed and compiled."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.fields import Mark, marked_fields
from gmlp_scale.models import AmlpConfig, GmlpConfig, build_model
from gmlp_scale.models.gmlp import GmlpBlock
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.resume import check_unchanged
from tests.triton_interpreter import run_interpreted

SIZES = {"num_blocks": 1, "d_model": 8, "d_ffn": 20, "sequence_length": 12, "vocab_size": 40}
RECOMPUTED = [(recompute, form) for recompute in ("none", "selective", "full") for form in ("eager", "aot_eager")]


def make_block(kernels: str, spatial: str = "toeplitz") -> GmlpBlock:
    block = GmlpBlock(AmlpConfig(**SIZES, d_attn=3, spatial=spatial, kernels=kernels))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return block


def output_and_gradients(block: GmlpBlock, forward, num_positions: int = 12, lengths=()) -> dict[str, torch.Tensor]:
    """lengths: the tokens of each row, if some of its positions are padding."""
    x_BND = torch.randn(2, num_positions, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    block.zero_grad()
    output_BND = forward(x_BND, torch.arange(num_positions) < torch.tensor(lengths)[:, None] if lengths else None)
    output_BND.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in block.named_parameters()}
    return {"output": output_BND.detach(), "x": x_BND.grad} | gradients


class Adapter(nn.Linear):
    """Takes the place of a Linear, as those of peft do."""


def _run_blocks() -> dict:
    results = {}
    for spatial in ("toeplitz", "dense"):
        for kernels in ("torch", "triton"):
            block = make_block(kernels, spatial)
            for num_positions in (12, 7):
                results[spatial, kernels, num_positions] = output_and_gradients(block, block, num_positions)
            results[spatial, kernels, "padded"] = output_and_gradients(block, block, 12, lengths=(12, 5))
            with torch.autocast("cpu", torch.bfloat16):  # parameters stay in float32 beside a bfloat16 z
                results[spatial, kernels, "autocast"] = output_and_gradients(block, block)
    adapted = make_block("triton")
    adapted.expand.__class__ = Adapter
    results["adapter"] = output_and_gradients(adapted, adapted)
    compiled = make_block("triton")
    compiled.compile(fullgraph=True)  # raises on a graph break
    results["compiled"] = output_and_gradients(compiled, compiled)
    return results


def _run_models() -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """Loss and gradients of a model by (recomputation, form)."""
    token_ids_BN = torch.randint(4, 40, (2, 12), generator=torch.Generator().manual_seed(2))
    batch = MaskedBatch(token_ids_BN, torch.tensor([[1, 5], [0, 11]]), torch.tensor([[7, 8], [9, 10]]))
    models = {}
    for recompute, form in RECOMPUTED:
        torch.compiler.reset()
        model = build_model(AmlpConfig(**SIZES | {"num_blocks": 2}, d_attn=3, kernels="triton"))
        model.set_recompute(recompute)
        if form == "aot_eager":
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        loss = model(batch)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        models[recompute, form] = {"loss": loss.detach()} | gradients
    return models


def _run_all() -> tuple[dict, dict]:
    return _run_blocks(), _run_models()


@pytest.fixture(scope="module")
def blocks_and_models() -> tuple[dict, dict]:
    return run_interpreted(_run_all)[0]


@pytest.fixture
def blocks(blocks_and_models) -> dict:
    return blocks_and_models[0]


@pytest.fixture
def models(blocks_and_models) -> dict:
    return blocks_and_models[1]


@pytest.mark.parametrize("rows", [12, 7, "padded"])
@pytest.mark.parametrize("spatial", ["toeplitz", "dense"])
def test_block_is_the_plain_one_at_full_and_shorter_length_and_with_padding(blocks, spatial, rows):
    torch.testing.assert_close(blocks[spatial, "triton", rows], blocks[spatial, "torch", rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spatial", ["toeplitz", "dense"])
def test_block_is_the_plain_one_under_autocast(blocks, spatial):
    found, expected = blocks[spatial, "triton", "autocast"], blocks[spatial, "torch", "autocast"]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and (found[name] - tensor).norm() < 0.03 * tensor.norm(), name


@pytest.mark.parametrize("recompute, form", RECOMPUTED[1:])
def test_recomputing_gives_the_same_bit_for_bit(models, recompute, form):
    expected, found = models[RECOMPUTED[0]], models[recompute, form]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(expected[name].any() for name in expected)


def test_an_adapter_is_called_and_has_its_gradients(blocks):
    torch.testing.assert_close(blocks["adapter"], blocks["toeplitz", "triton", 12], rtol=1e-5, atol=1e-4)


def test_compiling_breaks_no_graph_and_gives_the_same(blocks):
    expected = blocks["toeplitz", "triton", 12]  # with gradients up to some hundreds
    torch.testing.assert_close(blocks["compiled"], expected, rtol=1e-5, atol=1e-4)


def test_auto_is_plain_pytorch_on_a_cpu():
    results = [output_and_gradients(block, block) for block in (make_block("auto"), make_block("torch"))]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_kernels_are_refused_for_other_gatings():
    with pytest.raises(ValidationError, match=r"kernels triton is for .*, not gating linear"):
        GmlpConfig(**SIZES, gating="linear", kernels="triton")


def test_a_resumed_run_may_change_its_kernels():
    free = marked_fields(Mark.FREE_ON_RESUME, RunConfig)
    assert check_unchanged({"model": {"kernels": "auto"}}, {"model": {"kernels": "torch"}}, free) == []
