"""What a run would be, computed without starting it: the text of --dry-run."""

import math
from pathlib import Path

import torch

from gmlp_scale.activations import activation_bytes_per_token
from gmlp_scale.config import RunConfig
from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.data.loader import check_fit
from gmlp_scale.data.shards import Manifest
from gmlp_scale.engine import EngineConfig
from gmlp_scale.models import build_model
from gmlp_scale.train.checkpoint import step_folders


def count_parameters(run: RunConfig) -> int:
    return sum(p.numel() for p in _meta_model(run).parameters())


def flops_per_step(run: RunConfig) -> int:
    """Training FLOPs of one global batch: 3 x the forward pass, the head on the masked positions only."""
    num_masked = num_masked_positions(run.model.sequence_length, run.data.masked_fraction)
    return 3 * _meta_model(run).flops_per_sample(num_masked) * run.train.global_batch_size


def state_bytes_per_rank(
    num_parameters: int, precision: str, engine: EngineConfig, world_size: int
) -> dict[str, float]:
    """Bytes of parameters, gradients, master weights and the two moments on each rank.

    ZeRO stage 1 shards the master and the moments, stage 2 the gradients too, stage 3 everything (Rajbhandari et al.
    2020, figure 1). FSDP2 is stage 3 if it reshards after the forward pass, else stage 2; while it accumulates
    micro-batches its gradients are whole. Activations are not counted.
    """
    low = 2 if precision == "bf16" else 4
    match engine.kind:
        case "zero":
            stage = engine.stage
        case "fsdp2":
            stage = 3 if engine.reshard_after_forward else 2
        case "single":
            stage = 0

    def share(sharded: bool) -> int:
        return world_size if sharded else 1

    master = 4 if low == 2 else 0
    return {
        "parameters": num_parameters * low / share(stage >= 3),
        "gradients": num_parameters * 4 / share(stage >= 2),
        "float32 master": num_parameters * master / share(stage >= 1),
        "moments": num_parameters * 8 / share(stage >= 1),
    }


def describe(run: RunConfig, world_size: int) -> str:
    """The resolved config and what follows from it.

    Raises:
        ConfigError: if the recipe does not fit `world_size` ranks.
        ShardError: if the shards are there but do not fit the recipe.
    """
    micro_batches = f"{run.num_micro_batches(world_size)} micro-batches of {run.train.micro_batch_size} rows each"
    num_parameters = count_parameters(run)
    model_flops = flops_per_step(run)
    lines = [
        run.to_yaml(),
        f"ranks                   {world_size}, {micro_batches}",
        f"parameters              {num_parameters:,}",
        f"FLOPs per step          {short(model_flops)} ({short(model_flops / run.tokens_per_step)} per token)",
        f"tokens per step         {run.tokens_per_step:,}",
        f"tokens in all           {run.tokens_per_step * run.train.num_steps:,}",
        describe_states(num_parameters, run.train.precision, run.engine, world_size),
        _describe_activations(run),
        _describe_data(run),
        describe_resume(run.run_dir),
    ]
    return "\n".join(lines)


def describe_states(num_parameters: int, precision: str, engine: EngineConfig, world_size: int) -> str:
    states = state_bytes_per_rank(num_parameters, precision, engine, world_size)
    parts = ", ".join(f"{name} {short(size)}B" for name, size in states.items() if size)
    return f"states per rank         {short(sum(states.values()))}B ({parts}), activations not counted"


def _describe_activations(run: RunConfig) -> str:
    train = run.train
    per_token = activation_bytes_per_token(run.model, train.precision, train.recompute)
    whole = per_token * run.model.sequence_length * train.micro_batch_size
    return (
        f"activations per rank    {short(whole)}B ({short(per_token)}B per token with train.recompute="
        f"{train.recompute}) of the blocks in plain PyTorch; torch.compile and fused kernels keep less"
    )


def _meta_model(run: RunConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model(run.model)


def _describe_data(run: RunConfig) -> str:
    try:
        manifest = Manifest.load(run.data.shards)
    except FileNotFoundError as error:
        return f"steps per epoch         unknown: {error}"
    check_fit(manifest, run.data, run.model.sequence_length, run.model.vocab_size)
    rows = manifest.num_rows("train")
    steps = rows / run.train.global_batch_size
    return f"steps per epoch         {steps:,.1f} ({rows:,} rows); the run is {run.train.num_steps / steps:.2f} epochs"


def describe_resume(run_dir: Path) -> str:
    folders = step_folders(run_dir / "checkpoints")
    return f"would resume from       {folders[-1] if folders else 'nothing: a new run'}"


def short(value: float) -> str:
    """Four digits and an SI prefix."""
    exponent = min(5, max(0, math.floor(math.log10(max(value, 1)) / 3)))
    return f"{value / 1000**exponent:.4g} {' kMGTP'[exponent].strip()}"
