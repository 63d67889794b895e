"""Every kernel compiles for sm_90, in the form in which it is launched, and takes no more of a GPU than it should.

That needs no GPU, and finds mistakes that the interpreter cannot see.
"""

import sys

import pytest
import torch

from benchmarks.compiled_kernels import Launch, compile_for_hopper, lanes_of, launches_of, usage_of, without_kernels
from gmlp_scale.kernels import gate, layer_norm, spatial_weight
from gmlp_scale.kernels.layer_norm import BACKWARD_WARPS_PER_MULTIPROCESSOR, full_width
from tests.kernels.comparisons import (
    PARAMETERS,
    VECTORS,
    Case,
    fused_unit,
    inputs_of,
    output_and_gradients,
    spatial_gating_unit,
)

SHARED_MEMORY_BYTES = 227 * 1024
"""The most that a block of threads may have on an H100 or H200."""
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
CASES = [
    Case(512, "toeplitz", 128, BFLOAT16, 1, 1536, VECTORS),  # amlp_large, and what all engines keep in float32
    Case(512, "toeplitz", None, BFLOAT16, 1, 1536, VECTORS),  # gmlp_base
    Case(196, "dense", 64, BFLOAT16, 1, 1536, PARAMETERS),  # autocast
    Case(77, "toeplitz", 20, BFLOAT16, 1, 70),
    Case(512, "toeplitz", 64, FLOAT32, 1, 1536),
]


def launches(case: Case) -> list[Launch]:
    """Of training, and of the gate in inference, which is another kernel then."""
    inputs, grad_output = inputs_of(case)
    training = launches_of(lambda: output_and_gradients(fused_unit, inputs, grad_output))
    inference = launches_of(lambda: spatial_gating_unit(*inputs, None, 1e-5, False))
    return training + [launch for launch in inference if launch.arguments.get("output_BNG") is not None][:1]


def name_of(launch: Launch) -> str:
    return launch.kernel.__name__


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_compiles_and_fits(case):
    names = set()
    for launch in launches(case):
        compiled, name = compile_for_hopper(launch), name_of(launch)
        ptx, usage = compiled.asm["ptx"], usage_of(compiled)
        names.add(name)
        assert usage.shared_bytes <= SHARED_MEMORY_BYTES
        is_product = name in ("_spatial_gate_kernel", "_spatial_weight_gradient_kernel")
        assert ("wgmma.mma_async" in ptx) == (is_product and case.dtype == BFLOAT16)
        assert ("cp.async.bulk.tensor" in ptx) == launch.arguments.get("USES_TMA", False)
        if launch.arguments.get("NUM_STAGES") and launch.arguments["blocks_per_part"] > 1:
            assert "cp.async" in ptx  # the loop's next loads are under way while it computes
        if case.n % 16 == 0:
            assert usage.spilled_bytes == 0, (launch, usage)
            assert usage.programs_per_multiprocessor >= programs_at_once(launch), (launch, usage)
    assert len(names) == (5 if case.spatial == "dense" else 7)


def programs_at_once(launch: Launch) -> int:
    """The fewest that a multiprocessor has to hold. Of the gate's, one's GELU overlaps another's product."""
    if name_of(launch).endswith("_backward_kernel"):
        return BACKWARD_WARPS_PER_MULTIPROCESSOR // launch.options["num_warps"]
    return 2 if name_of(launch) == "_spatial_gate_kernel" and launch.arguments["BLOCK_G"] == 64 else 1


def test_lanes_beyond_the_edges_are_counted():
    """With blocks of 128 x 64 over 196 x 160."""
    z_BNF, v_BNG = (torch.empty(1, 196, width, dtype=BFLOAT16) for width in (320, 160))
    inputs = (z_BNF, v_BNG, torch.empty(196, 196, dtype=BFLOAT16), torch.empty(196), None, None, None, True)
    gate_launch = launches_of(lambda: gate.apply_gate(*inputs))[0]
    usage = usage_of(compile_for_hopper(gate_launch))
    masked, per_element = lanes_of(gate_launch, usage)
    assert masked == pytest.approx(1 - (196 * 160) / (256 * 192))
    outside = usage.instructions - usage.loop_instructions  # each of 128 threads computes 64 elements
    assert per_element == pytest.approx(outside / 64 / (1 - masked))


@pytest.mark.parametrize(
    "width, num_tokens, chunk, num_chunks, num_warps",
    [
        (128, 8, 128, 1, 2),
        (384, 2, 128, 3, 2),
        (768, 1, 256, 3, 2),
        (1024, 1, 1024, 1, 2),
        (1300, 1, 512, 3, 4),
        (1536, 1, 512, 3, 4),
        (2048, 1, 2048, 1, 4),
        (3072, 1, 1024, 3, 8),
    ],
)
def test_a_program_holds_whole_tokens_in_chunks_that_divide_them(width, num_tokens, chunk, num_chunks, num_warps):
    assert [*full_width(width).values()] == [num_tokens, chunk, num_chunks, num_warps]


def gate_tiles(case: Case) -> int:
    return sum(name_of(launch) == "_spatial_gate_kernel" for launch in launches(case)[:-1])


def test_the_gate_is_tuned_for_whole_blocks_in_bfloat16_only():
    assert [gate_tiles(case) for case in CASES] == [4, 4, 1, 1, 1]


def test_a_weight_at_an_odd_address_is_never_loaded_by_tma():
    z_BNF, v_BNG, buffer = (torch.empty(shape, dtype=BFLOAT16) for shape in ((1, 64, 256), (1, 64, 128), 64 * 64 + 1))
    for weight_NN, num_tiles in ((buffer[:-1], 4), (buffer[1:], 1)):
        inputs = (z_BNF, v_BNG, weight_NN.view(64, 64), torch.empty(64), None, None, None, True)
        assert len(launches_of(lambda inputs=inputs: gate.apply_gate(*inputs))) == num_tiles


def test_the_fastest_tile_stays(monkeypatch):
    """With Triton's tuner, and stand-ins for the launch and the clock."""
    tuner, launched = gate._tuned_spatial_gate_kernel, []
    monkeypatch.setattr(tuner, "cache", {})
    monkeypatch.setattr(tuner, "cache_results", False)  # Triton asks the device for its name
    monkeypatch.setattr(tuner.fn, "run", lambda *_, grid, **tile: launched.append((tile["BLOCK_G"], tile["USES_TMA"])))
    # Seconds that make the third tile the fastest.
    monkeypatch.setitem(vars(tuner), "do_bench", lambda call, quantiles: call() or [launched[-1] != (64, True)] * 3)
    z_BNF, v_BNG, weight_NN = (torch.empty(shape, dtype=BFLOAT16) for shape in ((1, 64, 256), (1, 64, 128), (64, 64)))
    for _ in range(2):
        gate.apply_gate(z_BNF, v_BNG, weight_NN, weight_NN[0], None, None, None, True)
    tiles = [(64, False), (128, False), (64, True), (128, True)]
    assert launched == [*tiles, (64, True), (64, True)]


def test_sums_over_the_batch_fill_a_gpu_and_no_more(monkeypatch):
    """At 32 rows of 128, of which the weight has one tile: 132 multiprocessors, or what they hold at once."""
    for module in (spatial_weight, layer_norm):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    v_BNG, z_BNF = (torch.empty(32, 128, width, dtype=BFLOAT16) for width in (1536, 3072))
    weight = launches_of(lambda: spatial_weight.spatial_weight_gradient(v_BNG, v_BNG, torch.empty(128, 128)))
    assert 120 <= len(weight[0].arguments["parts_PNN"]) <= 132
    assert 360 <= len(layer_norm.new_partial_sums(z_BNF)) <= 3 * 132


def test_a_call_of_the_operator_runs_little_python():
    """torch.library.custom_op took 250 functions and twice the time."""
    inputs, grad_output = inputs_of(Case(4, d_gate=4))
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor is not None]
    names = []
    with without_kernels(lambda *_: None):
        for observe in (None, lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None):
            sys.setprofile(observe)
            torch.autograd.grad(fused_unit(*inputs), leaves, grad_output)
            sys.setprofile(None)
    assert len(names) < 200, names
