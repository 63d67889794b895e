"""Float32 master weights with the optimizers' states, and the pieces of them that make up a checkpoint.

`single` and `fsdp2` keep all masters in Masters; `zero` only those of the vectors, the others are DeepSpeed's.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gmlp_scale.engine.adamw import MOMENTS, Adamw
from gmlp_scale.engine.float32_vectors import Vectors
from gmlp_scale.engine.muon import Muon
from gmlp_scale.engine.optimizer import OptimizerConfig

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
        vectors: those that every rank holds whole.
        others: the other masters, whose tensors are nn.Parameters.
        decayed: the parameters that weight decay applies to.
    """

    def __init__(
        self,
        vectors: Vectors,
        others: dict[str, Piece],
        config: OptimizerConfig,
        decayed: set[str],
        muon: Muon | None = None,
    ):
        self.vectors, self.others, self.muon = vectors, others, muon
        whole = {name: Piece(vector, tuple(vector.shape), 0) for name, vector in vectors.parameters.items()}
        self.masters = whole | others
        in_muon = muon.momenta.keys() if muon else ()
        self.matrices = {name: master.tensor for name, master in others.items() if name in in_muon}
        in_adamw = {name: master.tensor for name, master in self.masters.items() if name not in in_muon}
        self.optimizer = Adamw(in_adamw.items(), config, decayed)
        self.optimizer.create_moments(in_adamw.values())
        self.gradient_clipping = config.gradient_clipping

    def step(self, learning_rate: float, norm: Tensor) -> None:
        """Updates the masters from their gradients, whose global norm is `norm`, and drops the gradients."""
        self.optimizer.update(learning_rate, norm, self.gradient_clipping)
        if self.muon:
            gradients = {name: matrix.grad for name, matrix in self.matrices.items()}
            self.muon.step(
                self.matrices, gradients, learning_rate=learning_rate, norm=norm, max_norm=self.gradient_clipping
            )
        for master in self.others.values():
            master.tensor.grad = None
        self.vectors.flat.zero_()

    def state(self) -> Iterator[tuple[str, Piece]]:
        """What this rank gives to a checkpoint."""
        return self._pieces(name for name in self.masters if name not in self.vectors.given_by_others)

    def load(self, read: ReadSlice, step: int) -> None:
        load(self._pieces(self.masters), read)
        self.optimizer.num_steps.fill_(step)

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
