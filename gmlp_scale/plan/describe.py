"""Computes what a run would be and need without starting it; --dry-run prints it."""

import math

import torch
from torch import nn

from gmlp_scale.checkpoint.format import folder_name
from gmlp_scale.checkpoint.stores import saved_steps
from gmlp_scale.engine import TrainConfig
from gmlp_scale.plan.rank_bytes import activation_bytes_per_token, state_bytes
from gmlp_scale.recipe.config import PretrainingRecipe, RunConfig


def count_parameters(run: PretrainingRecipe) -> int:
    return sum(p.numel() for p in meta_model(run).parameters())


def describe(run: PretrainingRecipe, world_size: int) -> str:
    """The resolved config and what follows from it.

    Raises:
        ConfigError: the recipe does not fit `world_size` ranks.
        ShardError: the shards do not fit the recipe.
    """
    flops, tokens = run.flops_per_step(), run.tokens_per_step
    is_auto = run.train.precision == "auto"
    planned = run.with_train(precision="float32") if is_auto else run
    accumulates = run.accumulates(world_size)
    states = state_bytes(
        run.engine, meta_model(run), run.optimizer, planned.train.precision, world_size, accumulates=accumulates
    )
    lines = [
        run.to_yaml(),
        f"ranks                   {world_size}, {_describe_micro_batches(run, world_size)}",
        f"parameters              {count_parameters(run):,}",
        f"FLOPs per step          {flops.shown(short)} ({short(flops.last / tokens.last)} per token)",
        f"tokens per step         {tokens.shown()}",
        f"tokens in all           {tokens.before(run.train.num_steps):,}",
        *_describe_time_budget(run.train),
        *(["precision               decided when the run starts; below are float32's figures"] if is_auto else []),
        describe_states(states),
        _describe_activations(planned),
        _describe_data(run),
        describe_resume(run.run_folder, run.branch_from or "nothing: a new run"),
    ]
    return "\n".join(lines)


def describe_states(states: dict[str, float]) -> str:
    """A line with what an engine's state_bytes gives."""
    parts = ", ".join(f"{name} {short(size)}B" for name, size in states.items() if size)
    return f"states per rank         {short(sum(states.values()))}B ({parts}), activations not counted"


def _describe_micro_batches(run: PretrainingRecipe, world_size: int) -> str:
    rows, micro_batch_size = run.rows_per_rank(world_size).shown(), run.train.micro_batch_size
    if micro_batch_size == "auto":
        return f"{rows} rows each, in micro-batches that are decided when the run starts (train.micro_batch_size=auto)"
    num_micro_batches = run.train.num_micro_batches(world_size).shown()
    return f"{num_micro_batches} micro-batches of {micro_batch_size} rows each"


def _describe_time_budget(train: TrainConfig) -> list[str]:
    if train.time_budget_seconds is None:
        return []
    most = f"steps, tokens and epochs are those of at most {train.num_steps:,} steps"
    return [f"time budget             {train.time_budget_seconds:,.0f} s; {most}"]


def _describe_activations(run: PretrainingRecipe) -> str:
    train = run.train
    per_token = activation_bytes_per_token(run.model, train.precision, train.recompute)
    per_token_text = f"{short(per_token)}B per token with train.recompute={train.recompute}"
    if train.micro_batch_size != "auto":
        whole = per_token * run.model.sequence_length * train.micro_batch_size
        per_token_text = f"{short(whole)}B ({per_token_text})"
    where = "of the blocks in plain PyTorch; torch.compile and fused kernels keep less"
    return f"activations per rank    {per_token_text} {where}"


def meta_model(run: PretrainingRecipe) -> nn.Module:
    with torch.device("meta"):
        return run.build_model()


def _describe_data(run: PretrainingRecipe) -> str:
    try:
        num_rows = run.num_rows()
    except FileNotFoundError as error:
        return f"steps per epoch         unknown: {error}"
    if isinstance(run, RunConfig) and run.data.is_mixture:
        epochs = ", ".join(f"{epochs:.2f} of {name}" for name, epochs in run.epochs().items())
        return f"epochs of the run       {epochs}"
    epochs = run.train.batch_sizes.before(run.train.num_steps) / num_rows
    steps = run.train.num_steps / epochs
    return f"steps per epoch         {steps:,.1f} ({num_rows:,} rows); the run is {epochs:.2f} epochs"


def describe_resume(run_folder: str, start: str = "nothing: a new run") -> str:
    """`start`: where the run begins if it has no checkpoint of its own."""
    steps = saved_steps(run_folder)
    newest = f"{run_folder}/checkpoints/{folder_name(steps[-1])}" if steps else start
    return f"would resume from       {newest}"


def short(value: float) -> str:
    """`value` with four digits and an SI prefix."""
    exponent = min(5, max(0, math.floor(math.log10(max(value, 1)) / 3)))
    return f"{value / 1000**exponent:.4g} {' kMGTP'[exponent].strip()}"
