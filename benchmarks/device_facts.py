"""What a proof on a GPU begins with: the facts of the machine, and the tests that only a GPU can run."""

import datetime
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist

from gmlp_scale.distributed.world import start_world
from gmlp_scale.doctor.machines import said_by, version_of

PACKAGES = (
    "torch", "triton", "numpy", "pydantic", "PyYAML", "safetensors", "xxhash", "fsspec", "filelock", "tensorboard",
    "deepspeed", "transformers", "g-mlp-pytorch", "pytest",
)  # fmt: skip
"""What the parts import. Without the last four, only the checks of ZeRO, the peers and the tests are not run."""
NVIDIA_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
GPU_TESTS = ("tests/kernels", "tests/train/test_loop.py", "tests/train/test_profiling.py")


def environment(*, needs_gpu: bool) -> dict:
    """The machine's facts as a finding, with None for a package that is not installed.

    It fails if a GPU is needed and torch finds none.
    """
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": said_by("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "disk": said_by("stat", "--file-system", "--format=%T", tempfile.gettempdir()),
        "disk_free_gib": shutil.disk_usage(tempfile.gettempdir()).free // 2**30,
        **{package: version_of(package) for package in PACKAGES},
    }
    if torch.cuda.is_available() or not needs_gpu:
        facts["all_reduce of one rank"] = one_rank_all_reduce()
    if not torch.cuda.is_available():
        reason = "torch finds no CUDA device; --tiny tries the script on a CPU" if needs_gpu else None
        status = "failed" if needs_gpu else "passed"
        return {"check": "environment", "status": status, "reason": reason, "device_type": "cpu", **facts}
    device = torch.cuda.get_device_properties(0)
    smi = said_by("nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader", "--id=0")
    return {
        "check": "environment",
        "status": "passed",
        "reason": None,
        "device_type": "cuda",
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        **(dict(zip(NVIDIA_SMI, smi.split(", "), strict=True)) if smi else {"nvidia-smi": None}),
        **facts,
    }


def one_rank_all_reduce() -> str:
    """Whether NCCL (gloo on a CPU) can start, which takes a network interface, if only lo: "works" or the error."""
    try:
        with start_world(10, init_group=True, hear_stop_signals=False) as world:
            dist.all_reduce(torch.ones(1, device=world.device))
            world.wait_for_device()
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "works"


def run_gpu_tests(report: Callable[[dict], None]) -> None:
    """Runs the tests marked `gpu` and reports each; without a GPU or pytest they are not run."""
    if importlib.util.find_spec("pytest") is None:
        report({"check": "pytest", "status": "not run", "reason": "pytest is not installed"})
        return
    import pytest

    code = pytest.main(
        ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-m", "gpu", *GPU_TESTS], [_Reporting(report)]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        report({"check": "pytest", "status": "failed", "reason": str(code)})


class _Reporting:
    """A pytest plugin that reports each test as it ends."""

    def __init__(self, report: Callable[[dict], None]):
        self._report = report

    def pytest_runtest_logreport(self, report) -> None:
        """Called by pytest after a test's set-up, its call and its tear-down. Only the call can pass."""
        finding = {"check": report.nodeid, "reason": None, "seconds": round(report.duration, 2)}
        if report.skipped:
            self._report(finding | {"status": "not run", "reason": report.longrepr[2].removeprefix("Skipped: ")})
        elif report.failed:
            message = report.longrepr.reprcrash.message if report.longrepr else report.outcome
            self._report(finding | {"status": "failed", "reason": message.splitlines()[0]})
        elif report.when == "call":
            self._report(finding | {"status": "passed"})
