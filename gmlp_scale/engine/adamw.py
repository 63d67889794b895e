"""AdamW as BERT and the paper use it: vectors have no weight decay.

gmlp_scale/engine/muon.py has what optimizer.kind=muon does otherwise for the blocks' matrices.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gmlp_scale.engine.gradients import clip_divisor
from gmlp_scale.engine.optimizer import AdamwConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's states of a parameter."""


def decayed_names(model: nn.Module) -> set[str]:
    """The parameters that weight decay applies to: matrices that are not biases."""
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2 and "bias" not in name}


class Adamw(torch.optim.AdamW):
    """torch's fused AdamW, which the host spends little time on: all parameters have one step count.

    It has two groups: the names in `decayed`, and the rest. It goes by names because an engine may pass shards, whose
    shape no longer shows whether it is of a matrix.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: AdamwConfig, decayed: set[str]):
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in named_parameters:
            groups[name in decayed].append(parameter)
        decays = {True: config.weight_decay, False: 0.0}
        super().__init__(
            [{"params": groups[is_decayed], "weight_decay": decay} for is_decayed, decay in decays.items()],
            lr=config.peak_learning_rate,  # every step sets its own
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self.num_steps = torch.zeros(())
        self.grad_scale: Tensor | None = None  # what the kernel divides gradients by
        self.found_inf: Tensor | None = None

    def create_moments(self, parameters: Iterable[Tensor]) -> None:
        """Gives these parameters, all on one device, zero moments."""
        for parameter in parameters:
            self.state[parameter] = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            self.num_steps = self.num_steps.to(parameter.device)

    def update(self, learning_rate: float, norm: Tensor, max_norm: float | None) -> None:
        """One step on gradients of global norm `norm`, clipped to `max_norm`; no update if the norm is not finite.

        The host does not wait for the norm. The step counts all the same. So a resumed run, whose count is the step,
        goes on as the run that never stopped.
        """
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.found_inf = (~torch.isfinite(norm)).float()
        if max_norm is not None:
            self.grad_scale = clip_divisor(norm, max_norm)
        self.num_steps += 1
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters that have gradients, for the step number `num_steps`, with torch's kernel alone.

        torch's own step collects tensors one by one and counts for each. The kernel changes nothing if `found_inf`.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            first_moments, second_moments = ([state[moment] for state in states] for moment in MOMENTS)
            torch._fused_adamw_(
                parameters,
                [parameter.grad for parameter in parameters],
                first_moments,
                second_moments,
                [],
                [self.num_steps] * len(parameters),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
