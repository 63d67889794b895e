"""How long a dry run takes in a fresh process, beside importing torch alone."""

import subprocess
import sys

import torch

from gmlp_scale.benchmark.timing import medians, time_in_turns, turns_of


def measure_start_up(recipe: str, overrides: list[str], num_rounds: int) -> dict:
    commands = {
        "python": ["-c", ""],
        "import_torch": ["-c", "import torch"],
        "dry_run": ["launch/pretrain.py", "--config", recipe, "--dry-run", *overrides],
    }
    calls = {name: lambda command=command: run_python(command) for name, command in commands.items()}
    seconds = medians(time_in_turns(turns_of(calls, torch.device("cpu")), num_rounds))
    return {"seconds": seconds, "costs": {"dry_run_over_import_torch": seconds["dry_run"] / seconds["import_torch"]}}


def run_python(command: list[str]) -> None:
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
