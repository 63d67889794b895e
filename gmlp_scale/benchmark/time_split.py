"""Which operations a step's time goes to."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from gmlp_scale.benchmark.timing import wait_for

NUM_STEPS = 3
# The first kind with a word in an operation's name takes it. On CUDA the names are those of the kernels.
KINDS = {
    "matrix products": ("mm", "gemm", "cutlass", "xmma", "nvjet", "mkldnn_linear"),
    "optimizer and gradient norm": ("adam", "multi_tensor", "_foreach", "linalg", "norm_l2"),
    "attention": ("scaled_dot_product", "flash", "fmha"),
    "fused": ("triton_", "CompiledFxGraph", "spatial", "gate_kernel", "layer_norm_of_gelu"),
    "head and loss": ("softmax", "nll_loss"),
    "embedding": ("embedding", "index", "gather", "scatter"),
}


def time_split(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Fractions of the device's busy time by kind of operation, the largest first; they sum to one."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(NUM_STEPS):
            step()
        wait_for(device)
    seconds: dict[str, float] = {}
    for event in profiled.key_averages():
        spent = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kind = next((kind for kind, words in KINDS.items() if any(word in event.key for word in words)), "other")
        seconds[kind] = seconds.get(kind, 0.0) + spent
    total = sum(seconds.values())
    return {kind: spent / total for kind, spent in sorted(seconds.items(), key=lambda item: -item[1])}
