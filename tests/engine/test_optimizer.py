import functools

import pytest
import torch
from torch import nn

from gmlp_scale.engine.optimizer import (
    AdamwConfig,
    build_adamw,
    create_moments,
    decayed_names,
    global_norm,
    learning_rate,
    update,
)
from gmlp_scale.models import AmlpConfig, GmlpConfig, TransformerConfig, build_model

CONFIG = AdamwConfig(peak_learning_rate=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)


def rates_of(**fields):
    """The rate of each step of a run of 110."""
    config = AdamwConfig(peak_learning_rate=1e-4, **fields)
    return functools.partial(learning_rate, config, num_steps=110)


def test_learning_rate_climbs_to_its_peak_and_falls_to_zero_at_the_end_of_the_schedule():
    rate = rates_of(warmup_steps=10)
    assert rate(0) == pytest.approx(1e-5)  # the first update moves too
    assert rate(4) == pytest.approx(5e-5)
    assert rate(9) == rate(10) == 1e-4
    assert rate(60) == pytest.approx(5e-5)
    assert rate(109) == pytest.approx(1e-6)
    assert rate(110) == 0
    rates = [rate(step) for step in range(110)]
    assert max(rates) == 1e-4 and min(rates) > 0


def test_learning_rate_without_warm_up_starts_at_the_peak():
    assert rates_of(warmup_steps=0)(0) == 1e-4


def test_cosine_falls_slowly_at_first_and_at_last():
    rate = rates_of(schedule="cosine", warmup_steps=10)
    assert rate(9) == rate(10) == 1e-4 and rate(110) == 0
    assert [rate(step) for step in (35, 60, 85)] == pytest.approx([8.5355e-5, 5e-5, 1.4645e-5], rel=1e-4)


def test_stable_stays_at_its_peak_until_it_decays():
    rate = rates_of(schedule="stable", warmup_steps=10, decay_steps=20)
    assert {rate(step) for step in range(9, 91)} == {1e-4}
    assert rate(100) == pytest.approx(5e-5) and rate(110) == 0
    assert rates_of(schedule="stable", warmup_steps=0)(109) == 1e-4


@pytest.mark.parametrize(
    "config",
    [
        GmlpConfig(num_blocks=1, d_model=8, d_ffn=16, sequence_length=4, vocab_size=11),
        GmlpConfig(num_blocks=1, d_model=8, d_ffn=16, sequence_length=4, vocab_size=11, spatial="dense"),
        AmlpConfig(num_blocks=1, d_model=8, d_ffn=16, d_attn=4, sequence_length=4, vocab_size=11),
        TransformerConfig(
            num_blocks=1, d_model=8, d_ffn=16, num_heads=2, sequence_length=4, vocab_size=11, positions="absolute"
        ),
    ],
    ids=lambda config: f"{config.kind} {getattr(config, 'spatial', '')}",
)
def test_only_matrices_decay(config):
    model = build_model(config)
    decayed = decayed_names(model)
    norms = {f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, nn.LayerNorm) for p in ("weight", "bias")}
    matrices = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert matrices <= decayed | {"head.weight"}
    assert not decayed & norms
    for name, parameter in model.named_parameters():
        assert (name in decayed) == (parameter.ndim == 2 and "bias" not in name), name


def _reference_step(parameter, gradient, moments, step, rate, decay):
    """AdamW as its paper writes it, in float64."""
    first, second = moments
    first.mul_(0.8).add_(gradient * 0.2)
    second.mul_(0.95).add_(gradient**2 * 0.05)
    parameter.mul_(1 - rate * decay)
    parameter.sub_(rate * (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-6))


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_update_is_adamw_with_clipping_by_global_norm(max_norm):
    torch.manual_seed(0)
    parameters = {"matrix": nn.Parameter(torch.randn(5, 3)), "vector": nn.Parameter(torch.randn(7))}
    optimizer = build_adamw(parameters.items(), CONFIG, {"matrix"})
    create_moments(optimizer, parameters.values())
    expected = {name: p.detach().double() for name, p in parameters.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in range(1, 8):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        gradients = {name: p.grad.double() for name, p in parameters.items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        rate = 0.1 / step
        update(optimizer, rate, norm.float(), max_norm)
        scale = min(1.0, max_norm / (norm.item() + 1e-6)) if max_norm else 1.0
        for name, gradient in gradients.items():
            decay = 0.3 if name == "matrix" else 0.0
            _reference_step(expected[name], gradient * scale, moments[name], step, rate, decay)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", [torch.nan, torch.inf])
def test_a_norm_that_is_not_finite_leaves_all_but_the_count_as_it_was(norm):
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = build_adamw([("matrix", parameter)], CONFIG, {"matrix"})
    create_moments(optimizer, [parameter])
    parameter.grad = torch.ones(3, 3)
    update(optimizer, 0.1, torch.tensor(3.0), max_norm=1.0)
    before = parameter.detach().clone(), {key: value.clone() for key, value in optimizer.state[parameter].items()}
    parameter.grad = torch.full((3, 3), norm)
    update(optimizer, 0.1, torch.tensor(norm), max_norm=1.0)
    assert torch.equal(parameter, before[0])
    before[1]["step"] += 1  # as a resumed run counts
    assert optimizer.state[parameter].keys() == before[1].keys()
    assert all(torch.equal(value, before[1][key]) for key, value in optimizer.state[parameter].items())


def test_the_global_norm_is_right_for_large_gradients():
    torch.manual_seed(0)
    gradients = [torch.randn(512, 8192), torch.randn(4097), torch.randn(5), torch.tensor(0.5), torch.zeros(0)]
    exact = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()
    assert global_norm(gradients).item() == pytest.approx(exact.item(), rel=1e-6)
    assert global_norm([]).item() == 0.0


def test_update_repeats_bit_for_bit():
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(300, 257))
        optimizer = build_adamw([("matrix", parameter)], CONFIG, {"matrix"})
        for _ in range(5):
            parameter.grad = torch.randn_like(parameter)
            update(optimizer, 0.01, parameter.grad.norm(), max_norm=1.0)
        results.append(parameter.detach())
    assert torch.equal(*results)
