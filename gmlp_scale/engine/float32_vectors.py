"""The vectors that stay in float32 under train.precision=bf16: LayerNorms' gains and biases, and gMLP's w and b.

Gains and b start at 1, where bfloat16 has steps of 0.004 and 0.008, more than AdamW moves them in many steps. A
Linear's bias starts at 0, where bfloat16's steps are fine. F.linear takes it in its matrix's dtype, so it is rounded
together with its matrix.
"""

import torch
from torch import Tensor, nn

from gmlp_scale.distributed.world import World


def float32_vectors(model: nn.Module, precision: str) -> dict[str, nn.Parameter]:
    """By name. Without bf16 there are none, since nothing is rounded."""
    if precision == "float32":
        return {}
    biases_of_linears = {f"{name}.bias" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 1 and name not in biases_of_linears
    }


def round_matrices(model: nn.Module, precision: str) -> nn.Module:
    """Gives a float32 model the dtypes that it computes with, in place."""
    vectors = float32_vectors(model, precision)
    for name, parameter in model.named_parameters():
        if precision == "bf16" and name not in vectors:
            parameter.data = parameter.data.bfloat16()
    return model


class Vectors:
    """Float32 vectors that every rank holds whole and updates alike, beside what an engine shards.

    Their gradients add up in one flat tensor. So one collective is enough, and no gradient is left in the memory of a
    CUDA graph, which the next micro-batch overwrites. The ranks take turns in giving a vector to a checkpoint.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], world: World):
        self.parameters, self.world = parameters, world
        self.given_by_others = {name for index, name in enumerate(parameters) if index % world.size != world.rank}
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = torch.zeros(sum(sizes) + 1, device=world.device)  # the gradients, and a place for a squared norm
        self.flat_gradients = self.flat[:-1]
        for parameter, gradient in zip(parameters.values(), self.flat_gradients.split(sizes), strict=True):
            parameter.grad = gradient

    def average_gradients(self, squared_norm: Tensor | float = 0.0) -> Tensor:
        """Averages the gradients over the ranks, with one collective.

        squared_norm: that of the other gradients on this rank, 0-d. Returns the global norm of all gradients.
        """
        self.flat[-1] = squared_norm
        self.world.sum_on_device(self.flat)
        self.flat_gradients /= self.world.size
        return (self.flat[-1] + self.flat_gradients.square().sum()).sqrt()
