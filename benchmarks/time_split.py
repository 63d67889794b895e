"""How a step's time divides among kinds of operations."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gmlp_scale.train.trial import wait_for

NUM_STEPS = 3
# An operation belongs to the first kind that has a word in its lower-case name. On CUDA the names are the kernels'.
# Inductor's kernels come first, because their names list all they fuse. Attention comes before matrix products, because
# its kernels' names have "cutlass" too.
KINDS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "compiledfxgraph", "spatial", "layer_norm_of_gelu"),
    "attention": ("scaled_dot_product", "sdpa", "flash", "fmha"),
    "matrix products": ("::mm", "addmm", "bmm", "gemm", "cutlass", "nvjet", "splitk", "triton_tem", "mkldnn_linear"),
    "optimizer and gradient norm": ("adam", "multi_tensor", "_foreach", "linalg", "norm_l2"),
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
    return shares(profiled.key_averages(), device)


def shares(events: Iterable, device: torch.device) -> dict[str, float]:
    """`time_split` from a profile's events."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        # Events of the host count their kernels' time again, and annotations the time of everything inside them.
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    times: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.key)
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        times[kind] = times.get(kind, 0.0) + spent
    total = sum(times.values())
    return {kind: spent / total for kind, spent in sorted(times.items(), key=lambda item: -item[1])}


def kind_of(name: str) -> str:
    """The kind of an operation or kernel, by its name; "other" if no kind has a word in it."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
