"""Float32 master weights with the optimizers' states, and the pieces of them that make up a checkpoint.

`single` and `fsdp2` keep all masters in Masters; `zero` only those of the vectors, the others are DeepSpeed's.
"""

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gmlp_scale.engine.muon import Muon
from gmlp_scale.engine.optimizer import OptimizerConfig, build_adamw, create_moments, update

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's states of a parameter
MOMENTUM = "momentum"  # Muon's only state of a matrix

ReadSlice = Callable[[str, int, int], Tensor]
"""(key, first, stop) -> the float32 CPU tensor of the indices [first, stop) along dimension 0."""


@dataclass(frozen=True)
class Piece:
    """The indices [first, first + len(tensor)) along dimension 0 of a tensor of `shape`, in float32.

    A rank's master of a parameter is one. In a checkpoint's hands the engine may go on updating `tensor`: copy it
    before the next step.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    first: int


def model_key(name: str) -> str:
    return f"model.{name}"


def moment_key(name: str, moment: str) -> str:
    return f"optimizer.{name}.{moment}"


def read_elements(read: ReadSlice, key: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the flattened tensor, reading only the indices of dimension 0 that hold them."""
    if stop <= start:
        return torch.zeros(0)
    size = math.prod(shape[1:])  # elements per index
    first = start // size
    return read(key, first, -(-stop // size)).flatten()[start - first * size : stop - first * size]


class Masters:
    """Every master of this rank by parameter name, with the optimizers over them: AdamW, or Muon for its matrices.

    Args:
        masters: their tensors are nn.Parameters.
        decayed: the parameters that weight decay applies to.
        given_by_others: masters that other ranks hold too, and give to a checkpoint.
    """

    def __init__(
        self,
        masters: dict[str, Piece],
        config: OptimizerConfig,
        decayed: set[str],
        muon: Muon | None = None,
        given_by_others: Container[str] = (),
    ):
        self.masters, self.given_by_others = masters, given_by_others
        self.muon = muon
        in_muon = muon.momenta.keys() if muon else ()
        self.matrices = {name: master.tensor for name, master in masters.items() if name in in_muon}
        others = {name: master.tensor for name, master in masters.items() if name not in in_muon}
        self.optimizer = build_adamw(others.items(), config, decayed)
        self.gradient_clipping = config.gradient_clipping
        create_moments(self.optimizer, others.values())

    def step(self, learning_rate: float, norm: Tensor) -> None:
        """Updates the masters from their gradients, whose global norm is `norm`, and drops the gradients."""
        update(self.optimizer, learning_rate, norm, self.gradient_clipping)
        self.optimizer.zero_grad()
        if self.muon:
            gradients = {name: matrix.grad for name, matrix in self.matrices.items()}
            self.muon.step(
                self.matrices, gradients, learning_rate=learning_rate, norm=norm, max_norm=self.gradient_clipping
            )
            for matrix in self.matrices.values():
                matrix.grad = None

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, master in self.masters.items():
            if name in self.given_by_others:
                continue
            yield model_key(name), Piece(master.tensor.detach(), master.shape, master.first)
            for key, state in self._states(name, master):
                yield key, Piece(state, master.shape, master.first)

    @torch.no_grad()
    def load(self, read: ReadSlice, step: int) -> None:
        for name, master in self.masters.items():
            stop = master.first + len(master.tensor)
            master.tensor.copy_(read(model_key(name), master.first, stop))
            for key, state in self._states(name, master):
                state.copy_(read(key, master.first, stop))
        for state in self.optimizer.state.values():
            state["step"].fill_(step)

    def _states(self, name: str, master: Piece) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps of a master, in its shape, by the checkpoint's keys."""
        if name in self.matrices:
            yield moment_key(name, MOMENTUM), self.muon.momenta[name].view_as(master.tensor)
            return
        for moment in MOMENTS:
            yield moment_key(name, moment), self.optimizer.state[master.tensor][moment]
