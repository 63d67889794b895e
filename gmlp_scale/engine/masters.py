"""Float32 master weights with their AdamW moments, and the pieces of them that make up a checkpoint.

`single` and `fsdp2` keep their masters in these classes. `zero` keeps its own inside DeepSpeed, and uses only the keys
and Piece.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gmlp_scale.engine.optimizer import OptimizerConfig, build_adamw, create_moments, update

MOMENTS = ("exp_avg", "exp_avg_sq")

ReadSlice = Callable[[str, int, int], Tensor]
"""(key, first, stop) -> the float32 CPU tensor of the indices [first, stop) along dimension 0."""


@dataclass(frozen=True)
class Piece:
    """The indices [first, first + len(tensor)) along dimension 0 of a tensor of `shape`, in float32.

    The engine may go on updating `tensor`: copy it before the next step.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    first: int


def model_key(name: str) -> str:
    return f"model.{name}"


def moment_key(name: str, moment: str) -> str:
    return f"optimizer.{name}.{moment}"


@dataclass(frozen=True)
class Master:
    """This rank's slice of one parameter along dimension 0, which AdamW updates."""

    tensor: nn.Parameter
    shape: tuple[int, ...]
    first: int
    is_given: bool = True
    """Whether this rank gives it to a checkpoint. Of a master that all ranks hold, one does."""


class Masters:
    """Every master of this rank by parameter name, with the optimizer over them."""

    def __init__(self, masters: dict[str, Master], config: OptimizerConfig, decayed: set[str]):
        self.masters = masters
        self.optimizer = build_adamw(((name, master.tensor) for name, master in masters.items()), config, decayed)
        self.gradient_clipping = config.gradient_clipping
        create_moments(self.optimizer, (master.tensor for master in masters.values()))

    def step(self, learning_rate: float, norm: Tensor) -> None:
        """Updates the masters from their gradients, whose global norm is `norm`, and drops the gradients."""
        update(self.optimizer, learning_rate, norm, self.gradient_clipping)
        self.optimizer.zero_grad()

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, master in self.masters.items():
            if not master.is_given:
                continue
            yield model_key(name), Piece(master.tensor.detach(), master.shape, master.first)
            for moment in MOMENTS:
                tensor = self.optimizer.state[master.tensor][moment]
                yield moment_key(name, moment), Piece(tensor, master.shape, master.first)

    @torch.no_grad()
    def load(self, read: ReadSlice, step: int) -> None:
        for name, master in self.masters.items():
            stop = master.first + len(master.tensor)
            master.tensor.copy_(read(model_key(name), master.first, stop))
            state = self.optimizer.state[master.tensor]
            state["step"].fill_(step)
            for moment in MOMENTS:
                state[moment].copy_(read(moment_key(name, moment), master.first, stop))
