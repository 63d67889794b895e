"""Float32 master weights with their AdamW moments, and the pieces of them that a checkpoint is made of.

`single` and `fsdp2` keep what is here; `zero` keeps its own inside DeepSpeed and shares only the keys and Piece.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gmlp_scale.engine.optimizer import OptimizerConfig, build_adamw, create_moments, update

MOMENTS = ("exp_avg", "exp_avg_sq")

ReadRows = Callable[[str, int, int], Tensor]
"""(key, first_row, stop_row) -> float32 CPU tensor of these rows."""


@dataclass(frozen=True)
class Piece:
    """Rows [first_row, first_row + len(tensor)) along dimension 0 of a tensor of `shape`, in float32.

    The tensor may be the live one: copy it before the next step.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    first_row: int


def model_key(name: str) -> str:
    return f"model.{name}"


def moment_key(name: str, moment: str) -> str:
    return f"optimizer.{name}.{moment}"


@dataclass(frozen=True)
class Master:
    """This rank's rows of one parameter: what AdamW updates."""

    rows: nn.Parameter
    shape: tuple[int, ...]
    first_row: int

    @property
    def stop_row(self) -> int:
        return self.first_row + len(self.rows)


class Masters:
    """Every master of this rank by parameter name, with the optimizer over them."""

    def __init__(self, masters: dict[str, Master], config: OptimizerConfig, decayed: set[str]):
        self.masters = masters
        self.optimizer = build_adamw(((name, master.rows) for name, master in masters.items()), config, decayed)
        self.gradient_clipping = config.gradient_clipping
        create_moments(self.optimizer, (master.rows for master in masters.values()))

    def step(self, learning_rate: float, norm: Tensor) -> None:
        """Updates the masters from their gradients, of global norm `norm`, and drops the gradients."""
        update(self.optimizer, learning_rate, norm, self.gradient_clipping)
        self.optimizer.zero_grad()

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, master in self.masters.items():
            yield model_key(name), Piece(master.rows.detach(), master.shape, master.first_row)
            for moment in MOMENTS:
                tensor = self.optimizer.state[master.rows][moment]
                yield moment_key(name, moment), Piece(tensor, master.shape, master.first_row)

    @torch.no_grad()
    def load(self, read: ReadRows, step: int) -> None:
        for name, master in self.masters.items():
            master.rows.copy_(read(model_key(name), master.first_row, master.stop_row))
            state = self.optimizer.state[master.rows]
            state["step"].fill_(step)
            for moment in MOMENTS:
                state[moment].copy_(read(moment_key(name, moment), master.first_row, master.stop_row))
