"""Times each fused kernel of gmlp_scale/kernels beside plain PyTorch, eager and under torch.compile.

python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml train.micro_batch_size=32   # on a GPU
python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml --device none               # anywhere
TRITON_INTERPRET=1 python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml --device cpu   # a try

Prints JSON for one block at the recipe's shape: the seconds of every form, and the floor. The floor is the larger of
two times: the operations over the matrix rate, and the fewest bytes over the copy rate. Both rates are measured in the
same run. gain_of_block is the share of the compiled plain block's time that the kernel saves. On a CPU the shape is
tiny and the kernels are interpreted: the figures then mean nothing.

host_seconds is the host's shortest time to call the operator, with kernels that do nothing. compiled_for_sm_90 says
what each kernel takes of an H100: registers and spilled bytes of a thread, shared memory of a program, how many
programs a multiprocessor holds at once, its instructions and barriers, how many of its lanes compute in vain, and its
instructions for each element (benchmarks/compiled_kernels.py says how they are counted). The gate's kernel is there in
every tile that its tuner tries. --device none prints only these two.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compiled_kernels import compile_for_hopper, lanes_of, launches_of, usage_of, without_kernels
from benchmarks.reports import report_as_measured
from benchmarks.step import DTYPES, copy_call, matrix_calls
from benchmarks.timing import load_measurable, say, time_in_turns, turns_of
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.kernels.spatial_gating_unit import is_interpreted
from gmlp_scale.models import AmlpConfig, GmlpConfig
from gmlp_scale.models.gmlp import FUSED_FORM, GmlpBlock
from gmlp_scale.models.layers import diagonal_sums
from gmlp_scale.options import count
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.storage.files import local_path

NUM_CALLS = 2000
TINY = [
    "model.sequence_length=16", "model.d_model=16", "model.d_ffn=32", "train.micro_batch_size=1",
    "train.precision=float32",
]  # fmt: skip


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe of a gMLP or aMLP, whose micro-batch is timed")
    parser.add_argument("--device", choices=["cuda", "cpu", "none"], default="cuda", help="none: times no kernel")
    parser.add_argument("--rounds", type=count, default=7, help="timed turns of each form (default: %(default)s)")
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="also write the report to this file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device: run it on a GPU, or with --device none or cpu")
    if (options.device == "cpu") != is_interpreted():
        raise InputError("--device cpu needs TRITON_INTERPRET=1 in the environment, other devices need it unset")
    tiny = load_measurable(options.config, [*options.overrides, *TINY])
    run = tiny if options.device == "cpu" else load_measurable(options.config, options.overrides)
    if not isinstance(run.model, GmlpConfig) or not run.model.has_kernels:
        raise InputError(f"{options.config}: the fused kernels are for gMLP and aMLP with {FUSED_FORM}")
    if run.train.precision == "auto":
        raise InputError(f"{options.config}: train.precision: found auto; needed: float32 or bf16, the one timed here")
    report_as_measured(options.device, measure(run, tiny, options.device, options.rounds), options.output)
    return 0


def measure(run: RunConfig, tiny: RunConfig, device: str, num_rounds: int) -> Iterator[dict]:
    """The figures so far, again whenever there are more."""
    figures = {}
    if device != "none":
        for figures in measure_kernels(run, torch.device(device), num_rounds):
            yield figures
    if device != "cpu":
        figures["host_seconds"] = host_seconds(tiny, "cpu" if device == "none" else "cuda")
        yield figures | {"compiled_for_sm_90": compiled_kernels(run)}


def host_seconds(run: RunConfig, device: str) -> dict[str, float]:
    """The host's shortest time to call the operator, with kernels that do nothing. `run` has a tiny shape."""
    inputs, seconds = unit_inputs(run, device, requires_grad=True), []
    with without_kernels(lambda *_: None):
        for _ in range(NUM_CALLS):
            seconds.append(train_unit(inputs))
    forward, backward = map(min, zip(*seconds, strict=True))
    return {"forward": forward, "backward": backward}


def train_unit(inputs: list[Tensor | None]) -> tuple[float, float]:
    """Calls the operator and its backward pass; returns the seconds that the host took for each."""
    leaves, started = [tensor for tensor in inputs if tensor is not None], time.perf_counter()
    output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(*inputs, None, 1e-5, True)
    done = time.perf_counter()
    torch.autograd.grad(output_BNG, leaves, output_BNG)
    return done - started, time.perf_counter() - done


def compiled_kernels(run: RunConfig) -> list[dict]:
    """Each kernel of a training pass at the recipe's shape, compiled as it is launched; the tuned one in each tile.

    Nothing is launched, so no GPU is needed.
    """
    inputs, found = unit_inputs(run, "cpu", requires_grad=True, batch_size=1), []
    for launch in launches_of(partial(train_unit, inputs)):
        name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
        tile = {name: value for name, value in launch.arguments.items() if name.isupper()} | launch.options
        usage = usage_of(compile_for_hopper(launch))
        found.append({"kernel": name, "tile": tile} | usage._asdict() | lanes_of(launch, usage)._asdict())
    return found


class Piece(NamedTuple):
    """One kernel, and the fewest operations and bytes that it needs."""

    fused: Callable
    plain: Callable
    inputs: tuple
    flops: int
    num_bytes: int


def measure_kernels(run: RunConfig, device: torch.device, num_rounds: int) -> Iterator[dict]:
    """The figures so far: first the ceilings and the block, then also each kernel."""
    compiled = partial(torch.compile, backend="inductor" if device.type == "cuda" else "eager")
    matrix, (copy, copied_bytes) = matrix_calls(run, device), copy_call(device)
    blocks = {kernels: block_call(run, device, kernels, lambda block: block) for kernels in ("torch", "triton")}
    blocks |= {f"{kernels} compiled": block_call(run, device, kernels, compiled) for kernels in ("torch", "triton")}
    products = {f"product {name}": call for name, (call, _) in matrix.items()}
    say("block; the first rounds compile it")
    seconds = time_in_turns(turns_of(blocks | products | {"copy": copy}, device), num_rounds)
    matrix_rate = max(flops / seconds[f"product {name}"] for name, (_, flops) in matrix.items())
    copy_rate = copied_bytes / seconds["copy"]
    report = {
        "recipe": run.name,
        "micro_batch_size": run.train.micro_batch_size,
        "flops_per_second": matrix_rate,
        "bytes_per_second": copy_rate,
        "block_seconds": {name: seconds[name] for name in blocks},
        "kernels": {},
    }
    yield report
    for name, piece in pieces_of(run, device).items():
        say(name)
        functions = {"fused": piece.fused, "plain": piece.plain, "compiled": compiled(piece.plain)}
        calls = {form: partial(function, *piece.inputs) for form, function in functions.items()}
        forms = time_in_turns(turns_of(calls, device), num_rounds)
        floor = max(piece.flops / matrix_rate, piece.num_bytes / copy_rate)
        report["kernels"][name] = {
            "seconds": forms | {"floor": floor},
            "fraction_of_floor": floor / forms["fused"],
            "gain_of_block": (forms["compiled"] - forms["fused"]) / seconds["torch compiled"],
        }
        yield report


def block_call(run: RunConfig, device: torch.device, kernels: str, compiled: Callable) -> Callable[[], None]:
    """Forward and backward of one block."""
    model = run.model.model_copy(update={"kernels": kernels})
    dtype, shape = DTYPES[run.train.precision], (run.train.micro_batch_size, model.sequence_length, model.d_model)
    block = GmlpBlock(model).to(device, dtype)
    torch.nn.init.normal_(block.gating.weight, std=0.01)
    torch.nn.init.ones_(block.gating.bias)
    x_BND = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    forward = compiled(block)

    def call() -> None:
        torch.autograd.grad(forward(x_BND), (x_BND, *block.parameters()), torch.ones_like(x_BND))

    return call


def pieces_of(run: RunConfig, device: torch.device) -> dict[str, Piece]:
    from gmlp_scale.kernels.gate import apply_gate, apply_gate_backward
    from gmlp_scale.kernels.layer_norm import layer_norm_of_gelu, layer_norm_of_gelu_backward, new_partial_sums
    from gmlp_scale.kernels.spatial_weight import spatial_matrix, spatial_weight_gradient

    model, b, n, g = run.model, run.train.micro_batch_size, run.model.sequence_length, run.model.d_gate
    k = model.d_attn if isinstance(model, AmlpConfig) else 0
    random = partial(torch.randn, device=device, dtype=DTYPES[run.train.precision])
    z_BNF, gain_G, _, weight, bias_N, *attention, _ = unit_inputs(run, device)
    v_BNG, gate_BNG, grad_BNG = (random(b, n, g) for _ in range(3))
    mean_BN, rstd_BN = (torch.rand(b, n, device=device) + 0.5 for _ in range(2))
    grad_z_BNF, weight_NN = torch.empty_like(z_BNF), spatial_matrix(weight, z_BNF.dtype)
    half = v_BNG.nbytes
    flops = 2 * b * n * n * g

    def norm_backward(*inputs: Tensor) -> Tensor:
        layer_norm_of_gelu_backward(*inputs, grads_P4G := new_partial_sums(z_BNF))
        return grads_P4G.sum(0)[1:]

    return {
        "LayerNorm of GELU": Piece(
            layer_norm_of_gelu, plain_norm, (z_BNF, gain_G, gain_G, 1e-5), 0, 2 * half
        ),
        "spatial product and gate": Piece(
            partial(apply_gate, keeps_gate=True), plain_gate,
            (z_BNF, v_BNG, weight_NN, bias_N, *attention), flops + 2 * b * n * g * k, 4 * half,
        ),
        "gate backward": Piece(
            partial(apply_gate_backward, grads_P4G=new_partial_sums(z_BNF)), plain_gate_backward,
            (grad_BNG, z_BNF, gate_BNG, grad_z_BNF), 0, 5 * half,
        ),
        "weight gradient": Piece(
            spatial_weight_gradient, plain_weight_gradient, (grad_BNG, v_BNG, weight), flops, 2 * half
        ),
        "LayerNorm of GELU backward": Piece(
            norm_backward, plain_norm_backward,
            (grad_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF), 0, 3 * half,
        ),
    }  # fmt: skip


def unit_inputs(
    run: RunConfig, device: torch.device | str, *, requires_grad: bool = False, batch_size: int | None = None
) -> list[Tensor | None]:
    """The tensors that the operator takes, in its order; vectors in float32, as in every engine.

    batch_size: the recipe's micro-batch if it is None.
    """
    model, n, g = run.model, run.model.sequence_length, run.model.d_gate
    k = model.d_attn if isinstance(model, AmlpConfig) else 0
    b = batch_size or run.train.micro_batch_size
    vector = partial(torch.randn, device=device, requires_grad=requires_grad)
    matrix = partial(vector, dtype=DTYPES[run.train.precision])
    weight = matrix(n, n) if model.spatial == "dense" else vector(2 * n - 1)
    attention = [matrix(b, n, k), matrix(g, k), vector(g)] if k else [None, None, None]
    return [matrix(b, n, 2 * g), vector(g), vector(g), weight, vector(n), *attention, matrix(2 * g)]


def plain_norm(z_BNF: Tensor, gain_G: Tensor, bias_G: Tensor, eps: float) -> Tensor:
    v_BNG = z_BNF.chunk(2, dim=-1)[1]
    return F.layer_norm(F.gelu(v_BNG), gain_G.shape, gain_G.to(v_BNG.dtype), bias_G.to(v_BNG.dtype), eps)


def plain_gate(z_BNF, v_BNG, weight_NN, bias_N, context_BNK, out_weight_GK, out_bias_G) -> tuple[Tensor, Tensor]:
    gate_BNG = torch.bmm(weight_NN.expand(len(v_BNG), -1, -1), v_BNG) + bias_N[:, None].to(v_BNG.dtype)
    if context_BNK is not None:
        gate_BNG = gate_BNG + F.linear(context_BNK, out_weight_GK, out_bias_G.to(v_BNG.dtype))
    return F.gelu(z_BNF.chunk(2, dim=-1)[0]) * gate_BNG, gate_BNG


def plain_gate_backward(grad_output_BNG, z_BNF, gate_BNG, grad_z_BNF) -> tuple[Tensor, Tensor]:
    u_BNG, grad_u_BNG = z_BNF.chunk(2, dim=-1)[0], grad_z_BNF.chunk(2, dim=-1)[0]
    grad_gate_BNG = grad_output_BNG * F.gelu(u_BNG)
    grad_u_BNG.copy_(torch.ops.aten.gelu_backward(grad_output_BNG * gate_BNG, u_BNG))
    return grad_gate_BNG, grad_gate_BNG.sum(-1, dtype=torch.float32)


def plain_weight_gradient(grad_gate_BNG: Tensor, v_BNG: Tensor, like: Tensor) -> Tensor:
    """The sum over the batch of each row's product; summed over its diagonals if `like` is a Toeplitz vector."""
    grad_NN = torch.bmm(grad_gate_BNG, v_BNG.mT).sum(0, dtype=torch.float32)
    return grad_NN if like.ndim == 2 else diagonal_sums(grad_NN)


def plain_norm_backward(grad_v_BNG, z_BNF, mean_BN, rstd_BN, gain_G, grad_z_BNF) -> Tensor:
    gain_G = gain_G.to(z_BNF.dtype)
    v_BNG, grad_BNG = z_BNF.chunk(2, dim=-1)[1], grad_z_BNF.chunk(2, dim=-1)[1]
    grad_hidden_BNG, grad_gain_G, grad_bias_G = torch.ops.aten.native_layer_norm_backward(
        grad_v_BNG, F.gelu(v_BNG), gain_G.shape, mean_BN[..., None], rstd_BN[..., None], gain_G, gain_G, [True] * 3
    )
    grad_BNG.copy_(torch.ops.aten.gelu_backward(grad_hidden_BNG, v_BNG))
    return torch.stack([grad_BNG.sum((0, 1)), grad_gain_G, grad_bias_G])


if __name__ == "__main__":
    sys.exit(main())
