"""AdamW as BERT and the paper use it: vectors have no weight decay.

gmlp_scale/engine/muon.py has what optimizer.kind=muon does otherwise for the blocks' matrices.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor, nn

from gmlp_scale.engine.gradients import clip_divisor
from gmlp_scale.fields import CountFrom0, NotNegative, Positive, Share


class AdamwConfig(BaseModel, frozen=True, extra="forbid"):
    """The defaults are the main recipe's (section 4 of the paper)."""

    kind: Literal["adamw"] = "adamw"
    """AdamW for all parameters."""
    peak_learning_rate: Positive = 1e-4
    """The learning rate at the end of the warm-up. [no unit]"""
    schedule: Literal["linear", "cosine", "stable"] = "linear"
    """What the rate does after the warm-up. linear: it falls to 0 at the end of train.num_steps, as the paper's.
    cosine: the same along half a cosine. stable: it stays at its peak, and falls to 0 over the last decay_steps."""
    warmup_steps: CountFrom0 = 10_000
    """Steps over which the rate climbs from 0 to its peak, linearly. [steps]"""
    decay_steps: CountFrom0 = 0
    """For `stable` only. The steps at the end over which the rate falls; 0: it never does. [steps]"""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """How much of AdamW's mean of gradients, and of their squares, each step keeps. [fraction]"""
    eps: Positive = 1e-6
    """What AdamW adds to the root of the mean square, so that it never divides by 0. [no unit]"""
    weight_decay: NotNegative = 0.01
    """Each step takes this times the learning rate off the weights. On matrices only: not on LayerNorms, biases and the
    Toeplitz vector. [no unit]"""
    gradient_clipping: Positive | None = None
    """Largest global gradient norm; null never clips. [no unit]"""


class MuonConfig(AdamwConfig, frozen=True, extra="forbid"):
    """Muon for the matrices of the blocks; AdamW, with the fields above, for all other parameters."""

    kind: Literal["muon"] = "muon"
    """Muon for the matrices of the blocks, AdamW for the rest."""
    momentum: Share = 0.95
    """How much of Muon's mean of gradients each step keeps. [fraction]"""
    matrix_rate_ratio: Positive = 1.0
    """The learning rate of Muon's matrices over that of the rest. At 1 an update is about as large as AdamW's.
    [no unit]"""


def _with_kind(section: Any) -> Any:
    """Recipes and checkpoints from before there was a choice name no kind: they used AdamW."""
    return {"kind": "adamw"} | section if isinstance(section, dict) else section


OptimizerConfig = Annotated[AdamwConfig | MuonConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)]


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay applies to: matrices that are not biases."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2 and "bias" not in name}


def build_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: AdamwConfig, decayed: set[str]
) -> torch.optim.AdamW:
    """Fused AdamW with two groups: the names in `decayed`, and the rest.

    It goes by names because an engine may pass shards, whose shape no longer shows whether it is of a matrix.
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
        optimizer.grad_scale = clip_divisor(norm, max_norm)
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
