"""Times each fused kernel of gmlp_scale/kernels beside plain PyTorch, eager and under torch.compile.

python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml train.micro_batch_size=32   # on a GPU
python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml --device none               # anywhere
TRITON_INTERPRET=1 python benchmarks/kernels.py --config configs/pretrain/gmlp_base.yaml --device cpu   # a try

Prints JSON for one block at the recipe's shape: the seconds of every form, and the floor. The floor is the larger of
two times: the operations over the matrix rate, and the fewest bytes over the copy rate. Both rates are measured in the
same run. gain_of_block is the share of the compiled plain block's time that the kernel saves. On a CPU the shape is
tiny and the kernels are interpreted: the figures then mean nothing.

host_seconds is the host's shortest time to call the operator, with kernels that do nothing. compiled_for_sm_90 says
what each kernel takes of an H100: registers and spilled bytes of a thread, shared memory of a program, and how many
programs a multiprocessor holds at once. The gate's kernel is there in every tile that its tuner tries. --device none
prints only these two.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch
from torch import Tensor

from benchmarks.compiled_kernels import compile_for_hopper, launches_of, usage_of, without_kernels
from benchmarks.kernel_times import load_recipe, measure_kernels, unit_inputs
from gmlp_scale.distributed.logs import command
from gmlp_scale.errors import InputError
from gmlp_scale.kernels.spatial_gating_unit import is_interpreted
from gmlp_scale.recipe.config import RunConfig

NUM_CALLS = 2000


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe of a gMLP or aMLP, whose micro-batch is timed")
    parser.add_argument("--device", choices=["cuda", "cpu", "none"], default="cuda", help="none: times no kernel")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns of each form (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    if options.rounds < 1:
        parser.error("--rounds is a positive number")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device: run it on a GPU, or with --device none or cpu")
    if (options.device == "cpu") != is_interpreted():
        raise InputError("--device cpu needs TRITON_INTERPRET=1 in the environment, other devices need it unset")
    recipe = partial(load_recipe, options.config, options.overrides)
    report = {}
    if options.device != "cpu":
        report["host_seconds"] = host_seconds(recipe(tiny=True), "cpu" if options.device == "none" else "cuda")
        report["compiled_for_sm_90"] = compiled_kernels(recipe(tiny=False))
    if options.device != "none":
        report |= measure_kernels(recipe(tiny=options.device == "cpu"), torch.device(options.device), options.rounds)
    print(json.dumps(report, indent=1))
    return 0


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
    output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(*inputs, 1e-5, True)
    done = time.perf_counter()
    torch.autograd.grad(output_BNG, leaves, output_BNG)
    return done - started, time.perf_counter() - done


def compiled_kernels(run: RunConfig) -> list[dict]:
    """Each kernel of a training pass at the recipe's shape, compiled as it is launched; the tuned one in each tile.

    Nothing is launched, so no GPU is needed.
    """
    inputs = unit_inputs(run, "cpu", requires_grad=True, batch_size=1)
    return [
        {
            "kernel": launch.kernel.__name__.strip("_").removesuffix("_kernel"),
            "tile": {name: value for name, value in launch.arguments.items() if name.isupper()} | launch.options,
            **usage_of(compile_for_hopper(launch))._asdict(),
        }
        for launch in launches_of(partial(train_unit, inputs))
    ]


if __name__ == "__main__":
    sys.exit(main())
