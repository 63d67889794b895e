"""What a run says of itself when it starts."""

import platform
from importlib.metadata import version

import torch

from gmlp_scale import __version__
from gmlp_scale.config import Recipe
from gmlp_scale.engine import OptimizerConfig, TrainConfig
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.world import World


def banner(
    config: Recipe,
    world: World,
    *,
    train: TrainConfig,
    optimizer: OptimizerConfig,
    num_parameters: int,
    epochs: str,
    tokens_per_step: Piecewise,
    data: str,
    checkpoint: str | None,
    init_from: str | None,
) -> str:
    """The run's name and a line for each thing. All ranks call it together.

    Args:
        train, optimizer: with what was left to the data or to the memory filled in.
        epochs: of the whole schedule, in words.
        data: the data in a line.
        checkpoint: the one that the run resumes from.
        init_from: where a new run's weights are from.
    """
    num_steps = train.num_steps
    stop = f"; this start stops after step {train.stop_after_step:,}" if train.stop_after_step else ""
    if train.time_budget_seconds:
        stop = f"; at most {train.time_budget_seconds:,.0f} s{stop}"
    new_run = f"nothing: a new run with the weights of {init_from}" if init_from else "nothing: a new run"
    compiled = f", compile {str(train.compile).lower()}, recompute {train.recompute}"
    lines = {
        "versions": _versions(config.engine.kind),
        "ranks": _ranks(world),
        "parameters": f"{num_parameters:,}",
        "engine": f"{config.engine.kind}, {train.precision}{compiled}",
        "batch": f"{train.batch_sizes.told()} rows, {tokens_per_step.told()} tokens; each rank "
        f"{train.num_micro_batches(world.size).told()} x {train.micro_batch_size} rows",
        "steps": f"{num_steps:,}, {optimizer.warmup_steps:,} of them warm-up; {epochs}{stop}",
        "data": data,
        "output": config.run_folder,
        "resuming from" if checkpoint else "resuming": checkpoint or new_run,
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
    num_hosts = sum(world.gather(int(world.local_rank == 0)))
    hosts = f"{num_hosts} hosts" if num_hosts > 1 else platform.node()
    if world.device.type == "cuda":
        return f"{world.size} on {hosts}, each with one {torch.cuda.get_device_name(world.device)}"
    return f"{world.size} on {hosts}, each with {torch.get_num_threads()} CPU threads"
