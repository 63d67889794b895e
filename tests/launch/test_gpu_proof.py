"""launch/gpu_proof.sh without a GPU: its order, its limits and its report, and two parts at tiny shapes.

It shows that the script runs and reports truly what it ran; nothing of what a GPU would compute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = json.dumps({"recipes": {"gmlp_base": {"checkpoint": {"costs": {"stall_over_copy": 1.05}}}}})
STUB = f"""#!/bin/sh
case "$1 $2" in
    *" record") exec {sys.executable} "$@" ;;
    *" environment") echo '{{"check": "environment", "status": "passed", "reason": null, "device_type": "cuda"}}' ;;
    *" engines") echo '{{"check": "fsdp2", "status": "passed", "reason": null}}'; exit 3 ;;
    *" stop") kill -9 $$ ;;
    *" auto") exit 124 ;;
    "benchmarks/run.py --parts")
        for word; do [ "$option" != --output ] || echo '{MEASURED}' >"$word"; option=$word; done
        [ "$3" != checkpoint ] || exit 124 ;;
    *" recipe") echo '{{"check": "verified load", "status": "passed", "reason": null, "load_over_plain_read": 0.81}}' ;;
esac
"""


def prove(folder: Path, *arguments: str, **environment: str) -> tuple[int, dict[str, dict], str]:
    """The exit code, the line of each part by its name, and the report."""
    command = ["launch/gpu_proof.sh", *arguments]
    variables = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    report = (folder / "report.md").read_text()
    if done.returncode == 0:
        assert done.stdout.endswith(report), done.stdout + done.stderr
    return done.returncode, {line["part"]: line for line in lines}, report


@pytest.fixture
def stub(tmp_path) -> str:
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(0o755)
    return str(path)


def test_a_failing_part_stops_no_other_and_all_is_reported(stub, tmp_path):
    """No part is real: a stub stands for Python, and leaves at once."""
    code, parts, report = prove(tmp_path / "out", str(tmp_path / "out"), PYTHON=stub, GPU_PROOF_SECONDS="100000")
    assert code == 1
    assert len(parts) == 23 and [*parts][:2] == ["environment", "gpu_tests"]
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses.pop("engines") == statuses.pop("stop") == "failed" and statuses.pop("auto") == "cut by its limit"
    cut = [name for name in statuses if name.startswith("checkpoint")]
    assert {statuses.pop(name) for name in cut} == {"cut by its limit"} and set(statuses.values()) == {"passed"}, parts
    assert parts[cut[0]]["reason"] == "what it measured until then is below"
    assert "of its bytes to the host | at most 1.1 | 1.05 | met |" in report
    first, second, *_ = [part["limit_seconds"] for part in parts.values()]
    assert first == 20 and 40 <= second <= 60, "what environment leaves over goes to gpu_tests"
    assert [check["check"] for check in parts["engines"]["checks"]] == ["fsdp2"]
    assert "benchmarks/gpu_proof.py engines" in parts["engines"]["command"]
    assert "| verified load over a plain read of its files | at least 0.8 | 0.81 | met |" in report
    assert "not measured: step_gmlp_base passed" in report
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "report.md", "results.jsonl"]


def test_a_missing_package_ends_the_proof_at_once(tmp_path):
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError(\"No module named 'pydantic'\")")
    code, parts, report = prove(tmp_path / "out", "--tiny", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    assert code == 1 and list(parts) == ["environment"]
    missing = "No module named 'pydantic': install requirements.lock"
    assert f"- environment, environment: failed: {missing}" in report


def test_parts_run_at_tiny_shapes_where_there_is_no_gpu(tmp_path):
    names = ["environment", "gpu_tests", "recipe", "checkpoint_gmlp_base"]
    code, parts, report = prove(tmp_path, "--tiny", str(tmp_path), *names[1:], GPU_PROOF_SECONDS="100000")
    log = (tmp_path / "log.txt").read_text()
    assert code == 0 and list(parts) == names, log
    statuses = [parts[name]["status"] for name in names]
    assert statuses == ["passed", "not run", "passed", "passed"], log
    assert parts["gpu_tests"]["reason"] == "needs a GPU" and len(parts["gpu_tests"]["checks"]) > 8
    assert "- all_reduce of one rank: works" in report
    assert parts["environment"]["limit_seconds"] == 200, "a busy CPU has time"
    saves, resumed, load = parts["recipe"]["checks"]
    assert saves["stall_seconds"] > 0 and saves["steps_after_a_save_over_others"] > 0
    assert resumed["bit_identical_tensors"] > 50 and load["bytes"] > 0
    assert parts["checkpoint_gmlp_base"]["measured"]["recipes"]["gmlp_base"]["checkpoint"]["seconds"]["stall"] > 0
    assert "nothing of a GPU" in report and report.count("says nothing: no GPU") == 3
    assert "not measured: step_gmlp_base not run" in report


def test_a_part_without_the_time_it_needs_is_not_run_and_an_unknown_one_is_refused(stub, tmp_path):
    code, parts, _ = prove(tmp_path, str(tmp_path), "gpu_tests", "step", GPU_PROOF_SECONDS="30", PYTHON=stub)
    assert code == 1 and [*parts] == ["environment", "gpu_tests"]
    assert parts["gpu_tests"]["status"] == "not run" and parts["gpu_tests"]["reason"].startswith("needs 40 s, and ")
