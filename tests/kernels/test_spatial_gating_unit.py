"""The kernels against float64: on the CPU in Triton's interpreter, on a GPU at the sizes of the recipes."""

import pytest
import torch
import torch.nn.functional as F

from gmlp_scale.kernels import gate
from gmlp_scale.kernels.layer_norm import layer_norm_of_gelu
from tests.kernels.comparisons import (
    PARAMETERS,
    VECTORS,
    Case,
    fused_unit,
    inputs_of,
    output_and_gradients,
    relative_errors,
    spatial_gating_unit,
    tokens_of,
)
from tests.triton_interpreter import run_interpreted

BFLOAT16 = torch.bfloat16
BOUNDS = {torch.float32: 1e-5, BFLOAT16: 1e-2}
CASES = [
    Case(1), Case(1, "dense", 5), Case(1, dtype=BFLOAT16, batch_size=4),
    Case(77, d_gate=70), Case(77, "dense", 20, d_gate=70), Case(77, "dense", dtype=BFLOAT16), Case(77, d_attn=64),
    Case(128, "dense", batch_size=3), Case(128, d_attn=64, dtype=BFLOAT16, d_gate=130),
    Case(196, "dense"), Case(196, d_attn=6, dtype=BFLOAT16, d_gate=9),
    Case(60, batch_size=5, d_gate=70),  # more than one block to a program, and parts that cut sequences
    Case(77, d_attn=6, dtype=BFLOAT16, in_float32=VECTORS), Case(128, "dense", 5, BFLOAT16, in_float32=PARAMETERS),
    Case(77, padded=True), Case(77, "dense", 20, padded=True), Case(77, d_attn=6, dtype=BFLOAT16, padded=True),
    Case(512, batch_size=1, d_gate=12), Case(512, "dense", 16, BFLOAT16, batch_size=1, d_gate=12),
    Case(3, d_gate=1536), Case(3, d_gate=2048, dtype=BFLOAT16), Case(2, d_gate=1300),  # a token to a program
]  # fmt: skip
REPEATED = Case(77, d_attn=8, d_gate=70)
RECIPES = [
    Case(512, "toeplitz", None, BFLOAT16, 8, 1536),  # gmlp_base
    Case(512, "toeplitz", 128, BFLOAT16, 8, 1536),  # amlp_large
    Case(512, "toeplitz", 128, BFLOAT16, 8, 1536, VECTORS),
    Case(196, "dense", 64, BFLOAT16, 8, 1536, PARAMETERS),  # autocast
    Case(196, "dense", None, BFLOAT16, 8, 1536),
    Case(512, "toeplitz", 64, torch.float32, 2, 1536),
    Case(512, "toeplitz", 128, BFLOAT16, 8, 1536, VECTORS, padded=True),
]


def two_runs(case: Case, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    return [output_and_gradients(fused_unit, *inputs_of(case, device)) for _ in range(2)]


def errors_with_tile(case: Case, tile: dict[str, int], device: str = "cpu") -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "is_tuned", lambda *_: False)
        patch.setattr(gate, "BFLOAT16_TILES", [tile])
        patch.setattr(gate, "FLOAT32_TILE", tile)
        return relative_errors(case, device)


def normalised_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel and float64 make of rows whose mean is far from 0, or whose first number is far from the mean."""
    rows = torch.randn(3, 1536, generator=torch.Generator().manual_seed(0))
    rows += torch.tensor([100.0, -0.5, 3.0])[:, None]
    rows[2, 0] = 1000.0
    z_BNF, gain_G, bias_G = torch.cat([rows, rows], dim=-1)[None], torch.ones(1536), torch.zeros(1536)
    exact_BNG = F.layer_norm(F.gelu(rows.double()), (1536,), eps=1e-5)
    return layer_norm_of_gelu(z_BNF, gain_G, bias_G, 1e-5)[0][0], exact_BNG


def _run_all() -> dict:
    results = {case: relative_errors(case) for case in CASES}
    results["TMA"] = errors_with_tile(Case(36, d_attn=12, d_gate=20), gate.FLOAT32_TILE | {"USES_TMA": True})
    with torch.no_grad():
        inputs, _ = inputs_of(REPEATED)
        keeping, inferring = (spatial_gating_unit(*inputs, None, 1e-5, keeps) for keeps in (True, False))
    results["inference"] = [(output.numel(), torch.equal(keeping[0], inferring[0])) for output in inferring[:2]]
    return results | {"twice": two_runs(REPEATED), "rows": normalised_rows()}


def _check_operators() -> None:
    """PyTorch's own checks of schema, fake outputs and gradients, under tracing too."""
    for case in (Case(5, d_attn=3, d_gate=6), Case(5, "dense", d_gate=6, padded=True)):
        inputs, _ = inputs_of(case)
        leaves = [None if tensor is None else tensor.requires_grad_() for tensor in inputs]
        torch.library.opcheck(spatial_gating_unit, (*leaves, tokens_of(case), 1e-5, True))


def name_on_cpu(case: Case) -> str:
    """The interpreter has no bfloat16: it takes such inputs, computes in float32 and rounds the results."""
    return str(case).replace("torch.bfloat16", "bf16-rounded-late")


@pytest.fixture(scope="module")
def on_cpu() -> dict:
    return run_interpreted(_run_all)[0]


@pytest.mark.parametrize("case", CASES, ids=name_on_cpu)
def test_output_and_every_gradient_are_those_of_float64(on_cpu, case):
    assert max(on_cpu[case].values()) < BOUNDS[case.dtype], on_cpu[case]


def test_rows_far_from_zero_are_normalised_exactly(on_cpu):
    found, exact = on_cpu["rows"]
    errors = (found - exact).abs().amax(dim=1) / exact.abs().amax(dim=1)
    assert errors[:2].max() < 1e-5 and errors[2] < 1536 * 2**-22, errors


def test_a_tile_loaded_through_descriptors_gives_the_same(on_cpu):
    assert max(on_cpu["TMA"].values()) < BOUNDS[torch.float32], on_cpu["TMA"]


def test_two_runs_are_equal_bit_for_bit(on_cpu):
    first, second = on_cpu["twice"]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inference_keeps_no_gate_and_gives_the_same(on_cpu):
    (num_outputs, is_same), (num_kept, _) = on_cpu["inference"]
    assert num_outputs == 2 * 77 * 70 and is_same and num_kept == 0


def test_operators_keep_to_the_rules_of_pytorch():
    run_interpreted(_check_operators)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RECIPES, ids=str)
def test_output_and_every_gradient_are_those_of_float64_on_a_gpu(case):
    errors = relative_errors(case, "cuda")
    assert max(errors.values()) < BOUNDS[case.dtype], errors


@pytest.mark.gpu
@pytest.mark.parametrize("tile", gate.BFLOAT16_TILES, ids=str)
def test_every_tile_of_the_gate_gives_the_same_on_a_gpu(tile):
    errors = errors_with_tile(RECIPES[1], tile, "cuda")
    assert max(errors.values()) < BOUNDS[BFLOAT16], errors


@pytest.mark.gpu
@pytest.mark.parametrize("case", RECIPES, ids=str)
def test_two_runs_are_equal_bit_for_bit_on_a_gpu(case):
    first, second = two_runs(case, "cuda")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cpu_is_refused():
    inputs, _ = inputs_of(Case(3))
    with pytest.raises(ValueError, match=r"needs a CUDA device, but the model is on cpu: set model.kernels to auto"):
        fused_unit(*inputs)


def test_other_dtypes_are_refused():
    inputs, _ = inputs_of(Case(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"in bfloat16 and float32, not torch.float64: set it to torch"):
        fused_unit(*inputs)
