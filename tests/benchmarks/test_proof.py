"""The checks of launch/gpu_proof.sh on a CPU, and what they say where something is missing or differs."""

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Iterator

import pytest
import torch

from benchmarks import proof
from benchmarks.gpu_proof import one_rank_all_reduce
from benchmarks.proof import DifferenceError, Trial, compare_bits, compare_metrics, compiling, parity_with_cpu
from benchmarks.proof_report import record
from gmlp_scale.engine import computing
from gmlp_scale.models.gmlp import GmlpBlock
from tests.gloo_ranks import run_ranks
from tests.whole_runs import SMOKE

MEASURED = sorted((SMOKE.parents[2] / "docs/benchmarks").glob("*-cpu-gmlp_base-*.json"))[0]
TINY = ["model.d_model=16", "model.d_ffn=32", "model.sequence_length=32", "train.global_batch_size=4"]


@pytest.fixture
def trial(tmp_path) -> Iterator[Trial]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of so small products would only wait for each other
    yield Trial.prepare(str(SMOKE), [*TINY, "train.micro_batch_size=2"], tmp_path)
    torch.set_num_threads(num_threads)


def findings_of(check: str, trial: Trial) -> dict[str, dict]:
    return {finding["check"]: finding for finding in vars(proof)[f"check_{check}"](trial)}


def test_engines_are_compared_and_resumed_and_those_not_installed_are_named(trial, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = findings_of("engines", trial)
    assert len(found) == 25
    for name, finding in found.items():
        if name.startswith("zero"):
            assert finding["status"] == "not run" and finding["reason"] == "deepspeed is not installed"
        elif name.endswith("of the CPU"):
            assert finding["status"] == "not run" and finding["reason"] == "needs a GPU"
        else:
            assert finding["status"] == "passed", finding
            assert not name.endswith("resumed") or finding["bit_identical_tensors"] > 50
    assert len(found["single in float32: losses and norms"]["losses"]) == 6
    assert parity_with_cpu(trial) == {"train/loss differs by": 0.0}
    with pytest.raises(DifferenceError, match=r"steps 6 and 6: \d+ of \d+ tensors differ, .* by 0\.\d+ of its largest"):
        compare_bits(trial.checkpoint("single float32"), trial.checkpoint("single bf16"))
    with pytest.raises(DifferenceError, match="train/loss differs from single float32 by"):
        compare_metrics(trial, "single bf16", "single float32", {"train/loss": 1e-12})


def test_a_signal_stops_both_engines_with_a_checkpoint(trial):
    for finding in findings_of("stop", trial).values():
        assert finding["status"] == "passed" and finding["stopped_after_step"] == 3, finding


def test_a_part_ends_at_the_signal_of_its_limit(trial):
    with trial.world(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # as SIGTERM, which would end pytest


@torch._dynamo.config.patch(recompile_limit=8)  # a run sets it, also for the tests after this one
def test_each_compiled_case_has_its_own_graphs_and_fails_if_blocks_run_eager(trial, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compile = torch.nn.Module.compile  # Inductor would take 100 s
    monkeypatch.setattr(GmlpBlock, "compile", lambda block, **_: compile(block, backend="eager"))
    num_blocks = trial.config("x").model.num_blocks  # which are allowed one more each
    monkeypatch.setattr(computing, "GRAPHS_OF_BLOCKS", 2 - num_blocks)  # one to train and one to evaluate
    statuses = [finding["status"] for finding in findings_of("compile", trial).values()]
    assert statuses == ["passed", "passed", "not run", "passed", "not run", "not run", "not run"]
    shutil.rmtree(trial.folder / "single-true")
    too_many = pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit)
    monkeypatch.setattr(computing, "GRAPHS_OF_BLOCKS", 1 - num_blocks)
    with trial.world() as world, too_many:
        compiling(trial, world, "single", "true")


def test_a_part_that_was_cut_keeps_what_it_had_found(tmp_path):
    printed = '{"check": "one", "status": "passed", "reason": null}\n{"check": "two", "stat'
    line = record(tmp_path, "stop", code=124, seconds=20, limit=20, command="x", printed=printed)
    assert line["status"] == "cut by its limit" and [check["check"] for check in line["checks"]] == ["one"]
    line = record(tmp_path, "auto", code=2, seconds=1, limit=20, command="x", printed="")
    assert line["status"] == "failed" and line["reason"] == "exit code 2: log.txt says why"
    measured = json.loads(MEASURED.read_text())
    step = measured["recipes"]["gmlp_base"]["step"]
    step["contenders"]["bert"] = "not installed: transformers"
    record(tmp_path, "peers", code=0, seconds=1, limit=2, command="x", printed=json.dumps(measured, indent=1))
    report = (tmp_path / "report.md").read_text()
    assert "- peers, bert: not run: not installed: transformers" in report
    assert f"| peers | over_g_mlp_pytorch | {step['ratios']['over_g_mlp_pytorch']:.3g} |" in report
    assert f"| gmlp_base | {step['rows']} in {step['precision']} |" in report
    assert "not measured: step_gmlp_base not run" in report
    measured["recipes"]["gmlp_base"]["checkpoint"] = {"costs": {"stall_over_copy": 1.25}}
    for part in ("step_gmlp_base", "checkpoint_gmlp_base"):
        record(tmp_path, part, code=0, seconds=1, limit=2, command="x", printed=json.dumps(measured))
    goals = (tmp_path / "report.md").read_text().partition("| goal |")[2]
    assert f"| at least 0.40 | {step['ratios']['fraction_of_ceiling']:.3g} |" in goals
    assert "of its bytes to the host | at most 1.1 | 1.25 |" in goals
    assert "| stop | cut by its limit | 1 checks done, 0 of them failed | 20 | 20 |" in report


def _without_interface() -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "none"
    return one_rank_all_reduce()


def test_a_missing_network_interface_is_named():
    (found,) = run_ranks(_without_interface, 1)
    assert "none" in found
