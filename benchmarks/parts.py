"""Measures the chosen parts of the benchmark, recipe by recipe, on one device."""

import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.checkpointing import measure_checkpoint
from benchmarks.loading import measure_loading
from benchmarks.scaling import measure_scaling
from benchmarks.step import measure_step
from benchmarks.timing import medians, say, time_in_turns, turns_of
from gmlp_scale.distributed.world import start_world
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError, RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.resolve import with_decided_precision

USUAL_PARTS = ("step", "loader", "checkpoint", "start_up")
PARTS = (*USUAL_PARTS, "scaling")
PRETRAIN = Path(__file__).parents[1] / "launch/pretrain.py"


def measure(
    recipes: Iterable[str], overrides: Iterable[str], parts: list[str], num_rounds: int, *, with_peers: bool
) -> tuple[dict, dict]:
    """The machine's description, and the figures of every part of every recipe, by recipe and part.

    Raises:
        InputError: a part is unknown, or the recipes are for different devices.
        ConfigError: a recipe has mistakes, or a micro-batch size of auto.
        DeviceError: the recipes' device is not there.
    """
    if unknown := set(parts) - set(PARTS):
        raise InputError(f"--parts: found {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    overrides = ["engine.kind=single", *overrides]
    runs = {path: load_run_config(path, overrides) for path in recipes}
    check_measurable(runs)
    first, figures = next(iter(runs.values())), {}
    with start_world(first.engine.timeout_seconds, first.train.device, hear_stop_signals=False) as world:
        for path, run in runs.items():
            run = with_decided_precision(run, world)
            of_run = figures[run.name] = {}
            for part in parts:
                say(f"{run.name}: {part}")
                match part:
                    case "step":
                        of_run[part] = measure_step(run, world, num_rounds, with_peers=with_peers)
                    case "loader":
                        of_run[part] = measure_loading(run, num_rounds)
                    case "checkpoint":
                        of_run[part] = measure_checkpoint(run, world, num_rounds)
                    case "start_up":
                        of_run[part] = measure_start_up(path, overrides, num_rounds)
                    case "scaling":
                        of_run[part] = measure_scaling(path, overrides, num_rounds)
        return describe_machine(world.device), figures


def check_measurable(runs: Mapping[str, RunConfig]) -> None:
    if undecided := [path for path, run in runs.items() if run.train.micro_batch_size == "auto"]:
        raise ConfigError(undecided[0], ["train.micro_batch_size: found auto; needed: a number, the rows timed here"])
    first, *others = runs.values()
    for run in others:
        if run.train.device != first.train.device:
            raise InputError(
                f"train.device: found {first.train.device} in {first.name} and {run.train.device} in {run.name}, but a "
                "report is of one device: add train.device=auto, cpu or cuda, which holds for all recipes"
            )


def describe_machine(device: torch.device) -> dict:
    cpu = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({cpu})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measure_start_up(recipe: str, overrides: list[str], num_rounds: int) -> dict:
    """How long a dry run takes in a fresh process, beside importing torch alone."""
    commands = {
        "python": ["-c", ""],
        "import_torch": ["-c", "import torch"],
        "dry_run": [str(PRETRAIN), "--config", recipe, "--dry-run", *overrides],
    }
    calls = {name: partial(run_python, command) for name, command in commands.items()}
    seconds = medians(time_in_turns(turns_of(calls, torch.device("cpu")), num_rounds))
    return {"seconds": seconds, "costs": {"dry_run_over_import_torch": seconds["dry_run"] / seconds["import_torch"]}}


def run_python(command: list[str]) -> None:
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
