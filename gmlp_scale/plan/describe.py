"""What a run would be and need, computed without starting it; the text of --dry-run."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

from gmlp_scale.config import RunConfig
from gmlp_scale.data.batch import num_masked_positions
from gmlp_scale.data.loader import check_fit
from gmlp_scale.data.shards import Manifest
from gmlp_scale.engine import EngineConfig
from gmlp_scale.models import build_model
from gmlp_scale.plan.activations import activation_bytes_per_token
from gmlp_scale.train.checkpoint import step_folders

MEMORY_MARGIN = 0.05
"""Of all that is there, left free by train.micro_batch_size=auto: for the buffers of collectives and libraries, and
what an allocator cannot use."""


def count_parameters(run: RunConfig) -> int:
    return sum(p.numel() for p in _meta_model(run).parameters())


def flops_per_step(run: RunConfig) -> int:
    """Training FLOPs of one global batch: 3 x the forward pass, the head on the masked positions only."""
    num_masked = num_masked_positions(run.model.sequence_length, run.data.masked_fraction)
    return 3 * _meta_model(run).flops_per_sample(num_masked) * run.train.global_batch_size


def state_bytes_per_rank(
    model: nn.Module, precision: str, engine: EngineConfig, world_size: int, *, accumulates: bool
) -> dict[str, float]:
    """Bytes of parameters, gradients, master weights and the two moments on each rank, where they are the most.

    ZeRO stage 1 shards the master and the moments, stage 2 the gradients too, stage 3 everything (Rajbhandari et al.
    2020, figure 1). FSDP2 shards everything but what it gathers to compute with: all parameters, or, if it reshards
    after the forward pass, those of one group of blocks and the next and those outside of blocks; and while it
    accumulates micro-batches its gradients are whole. Activations are not counted.
    """
    num_parameters, num_in_blocks = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks))
    low = 2 if precision == "bf16" else 4
    if engine.kind == "fsdp2":
        num_gathered = num_parameters
        if engine.reshard_after_forward:
            share_of_blocks = min(1, 2 * engine.blocks_per_group / len(model.blocks))
            num_gathered -= (1 - share_of_blocks) * num_in_blocks
        return {
            "parameters": num_gathered * low,
            "gradients": num_parameters * 4 / (1 if accumulates else world_size),
            "float32 master": num_parameters * 4 / world_size,
            "moments": num_parameters * 8 / world_size,
        }
    stage = engine.stage if engine.kind == "zero" else 0

    def share(sharded: bool) -> int:
        return world_size if sharded else 1

    master = 4 if low == 2 else 0
    return {
        "parameters": num_parameters * low / share(stage >= 3),
        "gradients": num_parameters * 4 / share(stage >= 2),
        "float32 master": num_parameters * master / share(stage >= 1),
        "moments": num_parameters * 8 / share(stage >= 1),
    }


def state_bytes(run: RunConfig, world_size: int) -> float:
    """The sum of `state_bytes_per_rank`."""
    precision, accumulates = run.train.precision, run.accumulates(world_size)
    return sum(
        state_bytes_per_rank(_meta_model(run), precision, run.engine, world_size, accumulates=accumulates).values()
    )


def row_bytes(run: RunConfig) -> float:
    """What a row of a micro-batch takes on the CPU beside the states, at most, in training and evaluation."""
    model, precision = run.model, run.train.precision
    kept = activation_bytes_per_token(model, precision, run.train.recompute)
    of_one_block = activation_bytes_per_token(model, precision, "none") / model.num_blocks
    num_logits = num_masked_positions(model.sequence_length, run.data.masked_fraction) * model.vocab_size
    # Of the block that is being differentiated 2, what it computed again and the gradients of that; with what the C
    # library's heap keeps of them 5.2 were measured. Evaluation has logits in float32 as the head gives them, those of
    # valid labels, and their log-softmax. Attention takes 1.5 times the sum, for its probabilities are not counted.
    return 1.5 * ((kept + 6 * of_one_block) * model.sequence_length + 3 * 4 * num_logits)


def micro_batch_size_on_cpu(run: RunConfig, world_size: int, ranks_per_node: int) -> int:
    """The largest micro-batch that fits into this rank's part of the memory that is free now; 0 if none does."""
    checkpoint_bytes = 12 * count_parameters(run) / world_size  # the copy that is written while training goes on
    room = (1 - MEMORY_MARGIN) * available_memory_bytes() / ranks_per_node - checkpoint_bytes
    bytes_per_row = row_bytes(run)

    def fits(num_rows: int) -> bool:
        return state_bytes(run.with_micro_batch_size(num_rows), world_size) + num_rows * bytes_per_row <= room

    return largest_that_fits(divisors(run.rows_per_rank(world_size)), fits)


def largest_that_fits(candidates: Iterable[int], fits: Callable[[int], bool]) -> int:
    """Tries the largest candidate first and none after the first that fits; 0 where none does."""
    return next(filter(fits, sorted(candidates, reverse=True)), 0)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def available_memory_bytes() -> int:
    """Of this machine (Linux). The cache of files counts as free: memory-mapped shards fill it. A container's limit is
    not seen."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def describe(run: RunConfig, world_size: int) -> str:
    """The resolved config and what follows from it.

    Raises:
        ConfigError: if the recipe does not fit `world_size` ranks.
        ShardError: if the shards are there but do not fit the recipe.
    """
    decided = run
    if run.train.micro_batch_size == "auto" and run.train.device == "cpu":
        decided = run.with_micro_batch_size(micro_batch_size_on_cpu(run, world_size, ranks_per_node=world_size))
    accumulates = decided.accumulates(world_size)
    num_parameters = count_parameters(run)
    model_flops = flops_per_step(run)
    lines = [
        run.to_yaml(),
        f"ranks                   {world_size}, {_describe_micro_batches(run, decided, world_size)}",
        f"parameters              {num_parameters:,}",
        f"FLOPs per step          {short(model_flops)} ({short(model_flops / run.tokens_per_step)} per token)",
        f"tokens per step         {run.tokens_per_step:,}",
        f"tokens in all           {run.tokens_per_step * run.train.num_steps:,}",
        describe_states(_meta_model(run), run.train.precision, run.engine, world_size, accumulates=accumulates),
        _describe_activations(decided),
        _describe_data(run),
        describe_resume(run.run_dir),
    ]
    return "\n".join(lines)


def describe_states(
    model: nn.Module, precision: str, engine: EngineConfig, world_size: int, *, accumulates: bool
) -> str:
    states = state_bytes_per_rank(model, precision, engine, world_size, accumulates=accumulates)
    parts = ", ".join(f"{name} {short(size)}B" for name, size in states.items() if size)
    return f"states per rank         {short(sum(states.values()))}B ({parts}), activations not counted"


def _describe_micro_batches(run: RunConfig, decided: RunConfig, world_size: int) -> str:
    if decided.train.micro_batch_size == "auto":
        rows = run.rows_per_rank(world_size)
        return f"{rows} rows each, in micro-batches that are decided when the run starts (train.micro_batch_size=auto)"
    text = f"{decided.num_micro_batches(world_size)} micro-batches of {decided.train.micro_batch_size} rows each"
    return text if decided is run else f"{text} (train.micro_batch_size=auto, by the memory that is free here now)"


def _describe_activations(run: RunConfig) -> str:
    train = run.train
    per_token = activation_bytes_per_token(run.model, train.precision, train.recompute)
    per_token_text = f"{short(per_token)}B per token with train.recompute={train.recompute}"
    if train.micro_batch_size != "auto":
        whole = per_token * run.model.sequence_length * train.micro_batch_size
        per_token_text = f"{short(whole)}B ({per_token_text})"
    return (
        f"activations per rank    {per_token_text} of the blocks in plain PyTorch; torch.compile and fused kernels "
        f"keep less"
    )


def _meta_model(run: RunConfig) -> nn.Module:
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
