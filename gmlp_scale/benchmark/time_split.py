"""Which operations a step's time goes to."""

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gmlp_scale.benchmark.timing import wait_for

NUM_STEPS = 3
# The first kind with a word in an operation's name takes it, in small letters. On CUDA the names are those of the
# kernels. Inductor's are first, since theirs name all that they fuse; attention's are made of cutlass too.
KINDS = {
    "fused": ("triton_poi", "triton_red", "triton_per", "compiledfxgraph", "spatial", "layer_norm_of_gelu"),
    "attention": ("scaled_dot_product", "flash", "fmha"),
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
    """`time_split` of a profile's events."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        # The operation that launched a kernel bears its time too, and an annotation that of all it spans.
        events = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    times: dict[str, float] = {}
    for event in events:
        kind = kind_of(event.key)
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        times[kind] = times.get(kind, 0.0) + spent
    total = sum(times.values())
    return {kind: spent / total for kind, spent in sorted(times.items(), key=lambda item: -item[1])}


def kind_of(name: str) -> str:
    """The kind of an operation or kernel by its name; "other" where no kind has a word for it."""
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
