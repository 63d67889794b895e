"""What a run says of itself when it starts."""

import platform
from importlib.metadata import version

import torch

from gmlp_scale import __version__
from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.distributed.world import World
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.task import Task
from gmlp_scale.train.schedule import Schedule


def banner(task: Task, world: World, schedule: Schedule, checkpoint: Checkpoint | None, num_parameters: int) -> str:
    """The run's name and a line for each thing. All ranks call it together.

    Args:
        task: after its open_loader().
        checkpoint: the one that the run resumes from, or branches off.
        num_parameters: the model's.
    """
    config, train = task.config, task.train
    stop = f"; this start stops after step {train.stop_after_step:,}" if train.stop_after_step else ""
    if train.time_budget_seconds:
        stop = f"; at most {train.time_budget_seconds:,.0f} s{stop}"
    new_run = "nothing: a new run"
    if isinstance(config, RunConfig) and config.init_from:
        new_run += f" with the weights of {config.init_from}"
    compiled = f", compile {str(train.compile).lower()}, recompute {train.recompute}"
    lines = {
        "versions": _versions(config.engine.kind),
        "ranks": _ranks(world),
        "parameters": f"{num_parameters:,}",
        "engine": f"{config.engine.kind}, {train.precision}{compiled}",
        "batch": f"{train.batch_sizes.shown()} rows, {task.tokens_per_step.shown()} tokens; each rank "
        f"{train.num_micro_batches(world.size).shown()} x {train.micro_batch_size} rows",
        "steps": f"{schedule.num_steps:,}, {task.optimizer.warmup_steps:,} of them warm-up; "
        f"{_epochs(task, schedule.num_steps)}{stop}",
        "data": task.data,
        "output": config.run_folder,
        "resuming from" if checkpoint else "resuming": checkpoint.path if checkpoint else new_run,
    }
    return "\n".join([config.name, *(f"    {name:15}{value}" for name, value in lines.items())])


def _versions(engine: str) -> str:
    versions = [f"gmlp_scale {__version__}", f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    if engine == "zero":
        versions.append(f"deepspeed {version('deepspeed')}")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def _ranks(world: World) -> str:
    num_hosts = sum(world.gather(world.local_rank == 0))
    hosts = f"{num_hosts} hosts" if num_hosts > 1 else platform.node()
    if world.device.type == "cuda":
        return f"{world.size} on {hosts}, each with one {torch.cuda.get_device_name(world.device)}"
    return f"{world.size} on {hosts}, each with {torch.get_num_threads()} CPU threads"


def _epochs(task: Task, num_steps: int) -> str:
    """Of the whole schedule."""
    counts = task.epochs(num_steps)
    if "data/epoch" in counts:
        return f"{counts['data/epoch']:.4g} epochs of {task.num_rows:,} rows"
    return ", ".join(f"{count:.4g} epochs of {tag.removeprefix('data/epoch/')}" for tag, count in counts.items())
