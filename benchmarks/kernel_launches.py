"""What launching one block's kernels takes: the host's time, and each kernel's registers and shared memory.

Needs no GPU: nothing is launched, and the kernels are compiled for sm_90, which is an H100 or H200.
"""

import time

import torch

from benchmarks.compiled_kernels import compile_for_hopper, launches_of, usage_of, without_kernels
from benchmarks.kernel_times import unit_inputs
from gmlp_scale.recipe.config import RunConfig

NUM_CALLS = 2000


def host_seconds(run: RunConfig, device: str) -> dict[str, float]:
    """The host's shortest time to call the operator, with kernels that do nothing. `run` has a tiny shape."""
    inputs = unit_inputs(run, device, requires_grad=True)
    leaves = [tensor for tensor in inputs if tensor is not None]
    seconds = {"forward": [], "backward": []}
    with without_kernels(lambda *_: None):
        for _ in range(NUM_CALLS):
            started = time.perf_counter()
            output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(*inputs, 1e-5, True)
            done = time.perf_counter()
            torch.autograd.grad(output_BNG, leaves, output_BNG)
            seconds["backward"].append(time.perf_counter() - done)
            seconds["forward"].append(done - started)
    return {name: min(values) for name, values in seconds.items()}


def compiled_kernels(run: RunConfig) -> list[dict]:
    """Each kernel of a training pass at the recipe's shape, compiled as it is launched; the tuned one in each tile."""
    inputs = unit_inputs(run, "cpu", requires_grad=True, batch_size=1)
    leaves = [tensor for tensor in inputs if tensor is not None]

    def train() -> None:
        output_BNG, *_ = torch.ops.gmlp_scale.spatial_gating_unit.default(*inputs, 1e-5, True)
        torch.autograd.grad(output_BNG, leaves, output_BNG)

    return [
        {
            "kernel": launch.kernel.__name__.strip("_").removesuffix("_kernel"),
            "tile": {name: value for name, value in launch.arguments.items() if name.isupper()} | launch.options,
            **usage_of(compile_for_hopper(launch))._asdict(),
        }
        for launch in launches_of(train)
    ]
