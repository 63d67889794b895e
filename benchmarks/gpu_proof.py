"""What launch/gpu_proof.sh runs beside the benchmarks: checks, each of which prints a line of JSON for each finding.

python benchmarks/gpu_proof.py environment [--tiny]
python benchmarks/gpu_proof.py gpu_tests
python benchmarks/gpu_proof.py engines --config configs/pretrain/gmlp_base.yaml model.num_blocks=4 train.compile=false
python benchmarks/gpu_proof.py record OUT PART --code 0 --seconds 12 --limit 40 --command TEXT --printed FILE

A check leaves with 1 if anything failed. record adds a part to OUT/results.jsonl, writes OUT/report.md anew, and leaves
with 1 unless the part passed or was not run.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

from benchmarks.proof_report import record

RUNS = ("engines", "recipe", "stop", "auto", "compile")  # of proof.py, where check_NAME has the part NAME
PACKAGES = (
    "torch", "triton", "numpy", "pydantic", "PyYAML", "safetensors", "xxhash", "fsspec", "filelock", "tensorboard",
    "deepspeed", "transformers", "g-mlp-pytorch", "pytest",
)  # fmt: skip
"""Without the last four, only the checks of ZeRO, the peers and the tests are not run."""
NVIDIA_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    options = _parser().parse_args()
    if options.part == "record":
        facts = {"code": options.code, "seconds": options.seconds, "limit": options.limit, "command": options.command}
        line = record(options.folder, options.name, **facts, printed=options.printed.read_text(encoding="utf-8"))
        print(f"{line['part']}: {line['status']}" + (f" ({line['reason']})" if line["reason"] else ""))
        return 0 if line["status"] in ("passed", "not run") else 1

    findings, has_failed = os.fdopen(os.dup(1), "w"), False
    os.dup2(2, 1)  # what libraries print goes to standard error

    def report(finding: dict) -> None:
        nonlocal has_failed
        has_failed |= finding["status"] == "failed"
        print(json.dumps(finding), file=findings, flush=True)

    match options.part:
        case "environment":
            report(environment(needs_gpu=not options.tiny))
        case "gpu_tests":
            run_gpu_tests(report)
        case _:
            from benchmarks import proof

            with tempfile.TemporaryDirectory() as folder:
                trial = proof.Trial.prepare(options.config, options.overrides, Path(folder))
                for finding in vars(proof)[f"check_{options.part}"](trial):
                    report(finding)
    return int(has_failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("environment").add_argument("--tiny", action="store_true", help="a trial, which needs no GPU")
    parts.add_parser("gpu_tests")
    for name in RUNS:
        runs = parts.add_parser(name)
        runs.add_argument("--config", required=True)
        runs.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    adding = parts.add_parser("record")
    adding.add_argument("folder", type=Path, metavar="OUT")
    adding.add_argument("name", metavar="PART")
    for number in (
        "--code",
        "--seconds",
        "--limit",
    ):  # of the part's command: its exit code, how long it ran and might run
        adding.add_argument(number, type=int, default=0)
    adding.add_argument("--command", default="")
    adding.add_argument("--printed", type=Path, metavar="FILE", help="the part's standard output", required=True)
    return parser


def environment(*, needs_gpu: bool) -> dict:
    """The machine's facts as a finding, with None for a package that is not installed.

    It fails if a GPU is needed and torch finds none, or if what the other parts import cannot be imported.
    """
    try:
        from benchmarks import kernels, proof, run  # noqa: F401 - the other parts
    except ImportError as error:
        return {"check": "environment", "status": "failed", "reason": f"{error}: install requirements.lock"}
    import torch

    from gmlp_scale.doctor.checkup import said_by, version_of

    has_gpu = torch.cuda.is_available()
    missing = None if has_gpu or not needs_gpu else "torch finds no CUDA device; --tiny tries the script on a CPU"
    facts = {"check": "environment", "status": "failed" if missing else "passed", "reason": missing}
    if has_gpu:
        device = torch.cuda.get_device_properties(0)
        smi = said_by("nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader", "--id=0")
        facts |= {
            "device_type": "cuda",
            "device": device.name,
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
            "memory_gib": round(device.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            **(dict(zip(NVIDIA_SMI, smi.split(", "), strict=True)) if smi else {"nvidia-smi": None}),
        }
    else:
        facts["device_type"] = "cpu"
    facts |= {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": said_by("git", "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "disk": said_by("stat", "--file-system", "--format=%T", tempfile.gettempdir()),
        "disk_free_gib": shutil.disk_usage(tempfile.gettempdir()).free // 2**30,
        **{package: version_of(package) for package in PACKAGES},
    }
    return facts if missing else facts | {"all_reduce of one rank": one_rank_all_reduce()}


def one_rank_all_reduce() -> str:
    """Whether NCCL (gloo on a CPU) can start, which takes a network interface, if only lo: "works" or the error."""
    import torch
    import torch.distributed as dist

    from gmlp_scale.distributed.world import start_world
    from gmlp_scale.errors import InputError

    try:
        with start_world(10, init_group=True, hear_stop_signals=False) as world:
            dist.all_reduce(torch.ones(1, device=world.device))
            world.wait_for_device()
    except (InputError, RuntimeError) as error:
        return " ".join(str(error).split())
    return "works"


def run_gpu_tests(report: Callable[[dict], None]) -> None:
    """Runs the tests marked `gpu` and reports each; without a GPU or pytest they are not run."""
    if importlib.util.find_spec("pytest") is None:
        report({"check": "pytest", "status": "not run", "reason": "pytest is not installed"})
        return
    import pytest

    # The other files may need packages that are not installed.
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "@pytest.mark.gpu" in path.read_text()]
    words = ["-o", "addopts=", "-p", "no:cacheprovider", "-v", "-m", "gpu", *files]
    code = pytest.main(words, [_Reporting(report)])
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


if __name__ == "__main__":
    sys.exit(main())
