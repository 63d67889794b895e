"""More than one stop signal, up to the end of the interpreter: the run ends as it does after one."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.whole_runs import RECIPE, ROOT, SINGLE, SMOKE


def start(forty_rows: Path, folder: Path) -> subprocess.Popen:
    """A run that does not end by itself, once it trains. A process of its own, since what is tested is its very end."""
    long = ["train.num_steps=1000000", "train.evaluate_every_steps=1000000", "checkpoint.save_every_steps=1000000"]
    words = ["--config", SMOKE, *RECIPE, *SINGLE, *long, f"data.shards={forty_rows}", f"output_dir={folder}"]
    process = subprocess.Popen(
        [sys.executable, "launch/pretrain.py", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not (folder / "smoke/metrics.jsonl").exists() or not (folder / "smoke/metrics.jsonl").read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


def signal_until_gone(process: subprocess.Popen, number: int, every_seconds: float) -> str:
    """Sends the signal again and again; returns the process's errors."""
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(every_seconds)
    return process.stderr.read()


@pytest.mark.parametrize(
    "number, every_seconds", [(signal.SIGTERM, 0.02), (signal.SIGHUP, 0.01), (signal.SIGUSR1, 0.001)]
)
def test_stop_signals_that_keep_coming_end_a_run_as_one_does(number, every_seconds, forty_rows, tmp_path, trials):
    process = start(forty_rows, tmp_path)
    errors = signal_until_gone(process, number, every_seconds)
    assert process.returncode == 0 and "Traceback" not in errors, errors
    stopped_at = int(re.search(r"stopped after step (\d+)", errors)[1])
    assert newest_checkpoint(tmp_path / "smoke/checkpoints")[0].step == stopped_at
    trials("stop signals that keep coming until the process is gone", 1)


@pytest.mark.parametrize("every_seconds", [0.0, 0.03])
def test_interrupts_that_keep_coming_end_a_run_without_a_traceback(every_seconds, forty_rows, tmp_path, trials):
    process = start(forty_rows, tmp_path)
    errors = signal_until_gone(process, signal.SIGINT, every_seconds)
    is_stopped = every_seconds > 0 and process.returncode == 0  # it was done before the second one came
    assert is_stopped or process.returncode == 128 + signal.SIGINT, errors
    assert (is_stopped or errors.endswith("interrupted\n")) and "Traceback" not in errors, errors
    trials("stop signals that keep coming until the process is gone", 1)


def test_an_interrupt_while_a_command_still_imports_ends_it_in_one_line():
    process = subprocess.Popen([sys.executable, "-v", "launch/plan.py"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("import 'gmlp_scale' ") for line in lines)
    process.send_signal(signal.SIGINT)
    *_, last = lines
    assert process.wait() == 128 + signal.SIGINT
    assert last.endswith("interrupted\n")  # perhaps behind a line of -v that had no end yet
