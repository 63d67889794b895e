"""AdamW as BERT and the paper use it: the rate climbs and falls linearly, and vectors have no weight decay."""

from collections.abc import Iterable

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn


class OptimizerConfig(BaseModel, frozen=True, extra="forbid"):
    """The defaults are the main recipe's (section 4 of the paper)."""

    peak_learning_rate: float = Field(1e-4, gt=0)
    warmup_steps: int = Field(10_000, ge=0)
    """Steps over which the rate climbs from 0 to its peak; it falls to 0 over the rest of train.num_steps."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    """On matrices only: not on LayerNorms, biases and the Toeplitz vector."""
    gradient_clipping: float | None = Field(None, gt=0)
    """Largest global gradient norm; null never clips."""


def learning_rate(step: int, *, peak: float, warmup_steps: int, num_steps: int) -> float:
    """The rate of update number `step`, from 0: linear up to the peak over the warm-up, then down to 0 at num_steps."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * max(0.0, (num_steps - step) / (num_steps - warmup_steps))


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay applies to: matrices that are not biases."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2 and "bias" not in name}


def build_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, decayed: set[str]
) -> torch.optim.AdamW:
    """Fused AdamW with two groups: the names in `decayed`, and the rest.

    It goes by names because an engine may pass shards, whose shape no longer tells a matrix from a vector.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[name in decayed].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=config.peak_learning_rate,  # every step sets its own
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def create_moments(optimizer: torch.optim.AdamW, parameters: Iterable[Tensor]) -> None:
    """Gives every parameter zero moments, which AdamW would otherwise create at its first step."""
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def update(optimizer: torch.optim.AdamW, learning_rate: float, norm: Tensor, max_norm: float | None) -> None:
    """One AdamW step on gradients of global norm `norm`, clipped to `max_norm`; no step if the norm is not finite.

    The host does not wait for the norm. Fused AdamW's kernel divides by `grad_scale` and reads `found_inf`: if that is
    set, it skips the update and takes its step count back (torch/optim/adam.py, _fused_adam).
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.found_inf = (~torch.isfinite(norm)).float()
    if max_norm is not None:
        optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    optimizer.step()
    count_left_out(optimizer)


def count_left_out(optimizer: torch.optim.AdamW) -> None:
    """Counts an update that fused AdamW has just left out as a step all the same.

    A resumed run, whose count is the step, then goes on as the run that never stopped.
    """
    updated = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    counts = [optimizer.state[parameter]["step"] for parameter in updated]
    if counts:
        torch._foreach_add_(counts, [optimizer.found_inf] * len(counts))
