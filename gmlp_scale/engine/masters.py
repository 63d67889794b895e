"""Float32 master weights with the optimizers' states, and the pieces of them that make up a checkpoint.

`single` and `fsdp2` keep all masters in Masters; `zero` only those of the vectors, the others are DeepSpeed's.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace

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
    """A part of a float32 tensor of `shape`, from `first` on: indices of dimension 0 or, if `tensor` is flat where
    the whole is not, elements of the flattened whole.

    A rank's master of a parameter is one. In a checkpoint's hands the engine may go on updating `tensor`: copy it
    before the next step.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    first: int

    @property
    def by_elements(self) -> bool:
        return self.tensor.ndim != len(self.shape)


def model_key(name: str) -> str:
    return f"model.{name}"


def moment_key(name: str, moment: str) -> str:
    return f"optimizer.{name}.{moment}"


@torch.no_grad()
def load(pieces: Iterable[tuple[str, Piece]], read: ReadSlice) -> None:
    """Fills the pieces, by their keys in a checkpoint, with what `read` gives."""
    for key, piece in pieces:
        first, count = piece.first, len(piece.tensor) if piece.shape else 1
        if not piece.by_elements:
            piece.tensor.copy_(read(key, first, first + count))
        elif count:
            size = math.prod(piece.shape[1:])  # elements per index of dimension 0
            begin = first // size
            values = read(key, begin, -(-(first + count) // size)).flatten()  # of the indices that hold them
            piece.tensor.copy_(values[first - begin * size :][:count])


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

    def state(self) -> Iterator[tuple[str, Piece]]:
        """What this rank gives to a checkpoint."""
        return self._pieces(name for name in self.masters if name not in self.given_by_others)

    def load(self, read: ReadSlice, step: int) -> None:
        load(self._pieces(self.masters), read)
        for state in self.optimizer.state.values():
            state["step"].fill_(step)

    def _pieces(self, names: Iterable[str]) -> Iterator[tuple[str, Piece]]:
        for name in names:
            master = self.masters[name]
            yield model_key(name), replace(master, tensor=master.tensor.detach())
            for key, state in self._states(name, master):
                yield key, replace(master, tensor=state)

    def _states(self, name: str, master: Piece) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer keeps of a master, in its shape, by the checkpoint's keys."""
        if name in self.matrices:
            yield moment_key(name, MOMENTUM), self.muon.momenta[name].view_as(master.tensor)
            return
        for moment in MOMENTS:
            yield moment_key(name, moment), self.optimizer.state[master.tensor][moment]
