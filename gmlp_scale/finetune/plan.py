"""What finetuning would be, with the data read but nothing started: the text of --dry-run."""

import torch

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.finetune.finetuning import check_schedule, flops_per_step
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.models import build_model
from gmlp_scale.plan.describe import describe_resume, describe_states, short


def describe(runs: list[FinetuneConfig], num_seeds: int, inputs: Inputs, world_size: int) -> str:
    """The first run's resolved config and what follows from it, and the other runs of the grid by name.

    Raises:
        ConfigError: the ranks or the steps do not fit a recipe.
    """
    num_rows = inputs.rows["train"].num_rows
    for run in runs:
        check_schedule(run, num_rows, world_size)
    run = runs[0]
    num_steps, model_flops = run.num_steps(num_rows), flops_per_step(run, inputs.export)
    with torch.device("meta"):
        model = build_model(inputs.export.model, head=run.task_row.head)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_micro_batches = run.num_micro_batches(world_size)
    micro_batches = f"{num_micro_batches} micro-batches of {run.train.micro_batch_size} rows each"
    lines = [
        run.to_yaml(),
        f"model                   {inputs.export.model}",
        f"ranks                   {world_size}, {micro_batches}",
        f"parameters              {num_parameters:,}",
        f"FLOPs per step          {short(model_flops)} ({short(model_flops / run.tokens_per_step)} per token)",
        f"tokens per step         {run.tokens_per_step:,}",
        describe_states(model, run.train.precision, run.engine, world_size, accumulates=num_micro_batches > 1),
        *(
            f"{part:24}{rows.num_examples:,} examples, {rows.num_rows:,} rows of {run.data.sequence_length} tokens"
            for part, rows in inputs.rows.items()
        ),
        f"steps                   {num_steps:,}, {run.optimizer_config(num_rows).warmup_steps:,} of them warm-up; "
        f"{num_steps * run.train.global_batch_size / num_rows:.2f} epochs",
        describe_resume(run.run_dir),
    ]
    if len(runs) > 1 or num_seeds > 1:
        lines.append(
            f"runs                    {len(runs) + num_seeds - 1}: the grid's, then the other seeds' at the best"
        )
        lines += [f"    {run.run_dir}: {run.num_steps(num_rows):,} steps" for run in runs]
    return "\n".join(lines)
