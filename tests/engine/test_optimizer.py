import pytest
import torch
from torch import nn

from gmlp_scale.engine.adamw import Adamw, decayed_names
from gmlp_scale.engine.gradients import global_norm
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.train.schedule import learning_rate
from tests.models.every_kind import tiny_model

CONFIG = AdamwConfig(peak_learning_rate=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)


@pytest.mark.parametrize(
    "schedule, warmup_steps, decay_steps, wanted",
    [
        # The first update moves too; the rate climbs to its peak and falls to 0 at the end of the schedule.
        ("linear", 10, 0, {0: 1e-5, 4: 5e-5, 9: 1e-4, 10: 1e-4, 60: 5e-5, 109: 1e-6, 110: 0}),
        ("linear", 0, 0, {0: 1e-4}),
        # cosine falls slowly at first and at last
        ("cosine", 10, 0, {9: 1e-4, 10: 1e-4, 35: 8.5355e-5, 60: 5e-5, 85: 1.4645e-5, 110: 0}),
        # stable stays at its peak until it decays
        ("stable", 10, 20, dict.fromkeys(range(9, 91), 1e-4) | {100: 5e-5, 110: 0}),
        ("stable", 0, 0, {109: 1e-4}),
    ],
)
def test_learning_rates_of_a_run_of_110_steps(schedule, warmup_steps, decay_steps, wanted):
    fields = {"schedule": schedule, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
    config = AdamwConfig(peak_learning_rate=1e-4, **fields)
    rates = [learning_rate(config, step, num_steps=110) for step in range(111)]
    assert {step: rates[step] for step in wanted} == pytest.approx(wanted, rel=1e-4)
    assert max(rates) == 1e-4 and min(rates[:110]) > 0


@pytest.mark.parametrize("kind", ["gmlp", "gmlp-dense", "amlp", "bert-absolute", "avey"])
def test_only_matrices_decay(kind):
    model = tiny_model(kind)
    decayed = decayed_names(model)
    norms = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)]
    vectors = {f"{name}.{vector}" for name, norm in norms for vector, _ in norm.named_parameters()}
    matrices = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert matrices <= decayed | {"head.weight"}
    assert vectors and not decayed & vectors
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
    optimizer = Adamw(parameters.items(), CONFIG, {"matrix"})
    optimizer.create_moments(parameters.values())
    expected = {name: p.detach().double() for name, p in parameters.items()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in expected.items()}
    for step in range(1, 8):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        gradients = {name: p.grad.double() for name, p in parameters.items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        rate = 0.1 / step
        optimizer.update(rate, norm.float(), max_norm)
        scale = min(1.0, max_norm / (norm.item() + 1e-6)) if max_norm else 1.0
        for name, gradient in gradients.items():
            decay = 0.3 if name == "matrix" else 0.0
            _reference_step(expected[name], gradient * scale, moments[name], step, rate, decay)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_global_norm_is_right_for_large_gradients():
    torch.manual_seed(0)
    gradients = [torch.randn(512, 8192), torch.randn(4097), torch.randn(5), torch.tensor(0.5), torch.zeros(0)]
    exact = torch.cat([gradient.flatten().double() for gradient in gradients]).norm()
    assert global_norm(gradients).item() == pytest.approx(exact.item(), rel=1e-6)
    assert global_norm([]).item() == 0.0
