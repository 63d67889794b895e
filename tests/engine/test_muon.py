"""Muon as torch.optim.Muon computes it, on whole matrices and on parts of them; what it updates, and on which rank."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gmlp_scale.distributed.world import start_world
from gmlp_scale.engine import muon
from gmlp_scale.engine.muon import Muon, muon_matrices, orthogonalised, owners
from gmlp_scale.engine.optimizer import AdamwConfig, MuonConfig
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import tiny_model

CONFIG = MuonConfig(weight_decay=0.3, momentum=0.9, matrix_rate_ratio=0.5)
SHAPES = {"tall": (48, 20), "wide": (16, 33), "square": (8, 8)}
WHOLE = {name: (0, rows * columns) for name, (rows, columns) in SHAPES.items()}
ALONE = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"))


def _matrices() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_updates_are_torchs(precision, monkeypatch):
    if precision == "float32":  # torch's own iterations are always in bfloat16
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    ours = _matrices()
    theirs = {name: nn.Parameter(matrix.detach().clone()) for name, matrix in ours.items()}
    optimizer = Muon(CONFIG, SHAPES, [WHOLE], ALONE, precision)
    torchs = torch.optim.Muon(theirs.values(), weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 6):
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        for name, matrix in theirs.items():
            matrix.grad = gradients[name] * 0.7 / (norm + 1e-6)
        torchs.param_groups[0]["lr"] = 0.1 / step
        torchs.step()
        optimizer.step(ours, gradients, learning_rate=0.2 / step, norm=norm, max_norm=0.7)
    # In bfloat16 a last digit of an input that rounds the other way is seen in the result.
    tolerance = 1e-6 if precision == "float32" else 2e-3
    for name, matrix in ours.items():
        torch.testing.assert_close(matrix, theirs[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES.values())
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(2, *shape), torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3
    assert not orthogonalised(torch.zeros(1, *shape), torch.float32).any()


CUTS = {"tall": (0, 100, 100, 700, 960), "wide": (0, 0, 0, 528, 528), "square": (0, 1, 64, 64, 64)}
"""Where the parts of four ranks begin and end."""


def _update_in_parts(batch_elements: int) -> dict[str, torch.Tensor]:
    """This rank's parts of the matrices after two steps. One rank owns none of the three."""
    muon.BATCH_ELEMENTS = batch_elements
    with start_world(60, "cpu", init_group=True) as world:
        spans = [{name: (cuts[r], cuts[r + 1]) for name, cuts in CUTS.items()} for r in range(world.size)]
        return _two_steps(Muon(CONFIG, SHAPES, spans, world, "float32"), spans[world.rank])


def _two_steps(optimizer: Muon, span_of: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def part_of(tensors: dict) -> dict:
        return {name: tensors[name].detach().flatten()[slice(*span)] for name, span in span_of.items()}

    parts = part_of(_matrices())
    for _ in range(2):
        optimizer.step(parts, part_of(_matrices()), learning_rate=0.1, norm=torch.tensor(2.0), max_norm=1.0)
    return parts


@pytest.mark.parametrize("batch_elements", [2**24, 600, 1])
def test_parts_on_several_ranks_are_updated_as_the_whole_however_they_are_batched(batch_elements):
    whole = _two_steps(Muon(CONFIG, SHAPES, [WHOLE], ALONE, "float32"), WHOLE)
    ranks = run_ranks(_update_in_parts, 4, batch_elements)
    for name, matrix in whole.items():
        torch.testing.assert_close(torch.cat([parts[name] for parts in ranks]), matrix)


def test_every_matrix_has_one_owner_and_the_work_is_balanced():
    shapes = {
        f"{block}.{name}": shape for block in range(36) for name, shape in (("a", (512, 3072)), ("b", (1536, 512)))
    }
    for num_ranks in (1, 2, 5, 8, 100):
        owner_of = owners(shapes, num_ranks)
        assert owner_of.keys() == shapes.keys() and owner_of == owners(dict(shapes), num_ranks)
        work = [0] * num_ranks
        for name, (rows, columns) in shapes.items():
            work[owner_of[name]] += rows * columns
        assert max(work) <= sum(work) / num_ranks + 512 * 3072  # of one matrix more


@pytest.mark.parametrize(
    "kind, by_muon, by_adamw",
    [
        ("gmlp", {"expand", "project"}, set()),
        ("gmlp-dense", {"expand", "project"}, {"gating.weight"}),
        ("avey-ranked", {"expand", "project"}, {"spatial", "ranker.map"}),
        ("amlp", {"expand", "attention.qkv", "attention.out", "project"}, set()),
        (
            "bert-relative",
            {"attention.qkv", "attention.out", "expand", "project"},
            {"attention.relative_bias.table.weight"},
        ),
    ],
)
def test_muon_takes_the_matrices_of_the_blocks_linear_layers(kind, by_muon, by_adamw):
    model = tiny_model(kind)
    matrices = muon_matrices(model, MuonConfig())
    assert set(matrices) == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in by_muon}
    assert all(tuple(model.get_parameter(name).shape) == shape for name, shape in matrices.items())
    others = {name for name, parameter in model.named_parameters() if parameter.ndim == 2} - matrices.keys()
    assert {name for name in others if name.startswith("blocks.0.")} == {f"blocks.0.{matrix}" for matrix in by_adamw}
    assert "embedding.weight" in others
    assert muon_matrices(model, AdamwConfig()) == {}
