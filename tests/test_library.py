"""The package as a library: its names, and the README's Python, run as it stands there."""

import re
from pathlib import Path

import pytest
import torch

import gmlp_scale
from gmlp_scale import AmlpConfig, GmlpConfig, MaskedBatch, SpatialGatingUnit, build_model

README = (Path(__file__).parent.parent / "README.md").read_text()
OWN_LOOP, OWN_MODULE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SIZES = {"num_blocks": 2, "d_model": 8, "d_ffn": 16, "sequence_length": 6, "vocab_size": 20}


def test_the_readme_trains_in_a_loop_of_ones_own():
    token_ids = torch.randint(5, 1000, (4, 64), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(64) % 7 == 3, token_ids, -100)
    batch, losses = MaskedBatch.from_labels(token_ids, labels), []

    def batches():
        for _ in range(20):
            yield token_ids, labels
            losses.append(names["model"](batch).item())

    names = {"batches": batches()}
    exec(OWN_LOOP, names)
    assert losses[0] > 4 and losses[-1] < 0.5 * losses[0]


def test_the_readme_uses_a_spatial_gating_unit():
    names = {}
    exec(OWN_MODULE, names)
    x_BND = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))
    output_BND = names["block"](x_BND)
    assert output_BND.shape == x_BND.shape and output_BND.isfinite().all()
    output_BND.sum().backward()
    assert names["block"][2].weight.grad.abs().sum() > 0


def test_a_built_model_has_initial_weights_of_its_seed():
    config = AmlpConfig(**SIZES, d_attn=4)
    models = [build_model(config, seed=seed) for seed in (0, 0, 1)]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch.get_rng_state()
        trained = build_model(config, seed=None)
        assert torch.equal(torch.get_rng_state(), before)
    trained.init_weights(torch.Generator().manual_seed(1))
    first, same, other, filled = (model.state_dict() for model in (*models, trained))
    for name, value in first.items():
        assert torch.equal(value, same[name]) and torch.equal(other[name], filled[name])
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    with torch.device("meta"):
        assert build_model(GmlpConfig(**SIZES | {"vocab_size": 2**40})).embedding.weight.is_meta


@pytest.mark.parametrize("spatial", ["toeplitz", "dense"])
def test_a_unit_alone_begins_as_one_in_a_model(spatial):
    """W near zero and b one, so the split gating passes u on; the linear one passes its normalised input on."""
    torch.manual_seed(0)
    z_BNF = torch.randn(2, 6, 16)
    split = SpatialGatingUnit(16, 6, spatial=spatial)
    torch.testing.assert_close(split(z_BNF), z_BNF[..., :8], atol=0.05, rtol=0)
    assert 0 < split.weight.abs().max() < 0.01
    linear = SpatialGatingUnit(16, 6, spatial=spatial, gating="linear")
    torch.testing.assert_close(linear(z_BNF), linear.norm(z_BNF), atol=0.05, rtol=0)


def test_labels_of_every_position_become_a_masked_batch():
    token_ids_BN = torch.arange(10, 20).view(2, 5)
    labels_BN = torch.tensor([[-100, 7, -100, 8, 9], [-100, -100, -100, -100, 6]])
    batch = MaskedBatch.from_labels(token_ids_BN, labels_BN)
    assert batch.masked_positions_BM.tolist()[0] == [1, 3, 4]
    assert batch.labels_BM.tolist() == [[7, 8, 9], [-100, -100, 6]]
    assert torch.equal(labels_BN.gather(1, batch.masked_positions_BM), batch.labels_BM)
    with pytest.raises(ValueError, match=r"found labels of shape \(2, 4\) beside token ids of shape \(2, 5\)"):
        MaskedBatch.from_labels(token_ids_BN, labels_BN[:, :4])
    with pytest.raises(ValueError, match="a label other than -100"):
        MaskedBatch.from_labels(token_ids_BN, torch.full_like(labels_BN, -100))


def test_every_name_is_there():
    for name in gmlp_scale.__all__:
        assert getattr(gmlp_scale, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'build_modle'"):
        gmlp_scale.build_modle  # noqa: B018
