"""Muon for the matrices of the blocks, with the mathematics of torch.optim.Muon (Jordan et al. 2024).

    momentum = lerp(momentum, gradient, 1 - mu)
    update   = orthogonalised(lerp(gradient, momentum, mu))              # Nesterov's
    matrix   = (1 - rate * decay) * matrix - rate * 0.2 * sqrt(max(rows, columns)) * update

The last factor gives an update the root mean square of AdamW's (Liu et al. 2025, arXiv 2502.16982, equation 4; torch
calls it match_rms_adamw), so one learning rate serves for both. An orthogonalised update is a function of the whole
matrix, but an engine may hold only a part of it on each rank. So every matrix has one owner: all parts go there in one
all-to-all, the owner computes, and the parts of its result come back in another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.gradients import clip_divisor
from gmlp_scale.engine.optimizer import MuonConfig, OptimizerConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""These three are torch.optim.Muon's defaults."""

BATCH_ELEMENTS = 2**24
"""How much is computed together, so that the host starts few kernels and they need little memory."""

T = TypeVar("T")
Span = tuple[int, int]
"""The elements [start, stop) of a flattened matrix."""


def muon_matrices(model: nn.Module, optimizer: OptimizerConfig) -> dict[str, tuple[int, int]]:
    """The shapes of the parameters that Muon updates, by name: the weights of all nn.Linear in the blocks.

    AdamW updates the rest (docs/optimizers.md has the table). Without Muon there are none.
    """
    if not isinstance(optimizer, MuonConfig):
        return {}
    linears = {id(module.weight) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if id(parameter) in linears}


def owners(shapes: Mapping[str, tuple[int, int]], num_ranks: int) -> dict[str, int]:
    """The rank that orthogonalises each matrix: the costliest first, each to the rank with the least work so far."""
    work = [0] * num_ranks
    owner_of = {}
    for name in sorted(shapes, key=lambda name: -_multiply_adds(shapes[name])):
        owner_of[name] = work.index(min(work))
        work[owner_of[name]] += _multiply_adds(shapes[name])
    return owner_of


def _multiply_adds(shape: tuple[int, int]) -> int:
    """How many one Newton-Schulz iteration takes."""
    fewer, more = sorted(shape)
    return 2 * fewer * fewer * more + fewer**3


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V' of each matrix U S V' of [matrices, rows, columns]: five Newton-Schulz iterations in `dtype` bring all
    singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrices.to(dtype)
    is_tall = wide.shape[1] > wide.shape[2]
    if is_tall:
        wide = wide.mT
    wide = wide / torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if is_tall else wide


def batches(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names in their order, in lists of at most BATCH_ELEMENTS together, or of one name."""
    found, total = [], BATCH_ELEMENTS
    for name, size in sizes.items():
        total += size
        if total > BATCH_ELEMENTS:
            found.append([])
            total = size
        found[-1].append(name)
    return found


class Muon:
    """The momentum of this rank's parts of the matrices, and the update that all ranks compute together.

    Args:
        shapes: the matrices' shapes by name, in the same order on every rank.
        spans: for each rank, the part that it holds of each matrix. The parts are in the order of the ranks.
        precision: Newton-Schulz runs in bfloat16 under "bf16", as torch.optim.Muon's, else in float32.
    """

    def __init__(
        self,
        config: MuonConfig,
        shapes: Mapping[str, tuple[int, int]],
        spans: list[dict[str, Span]],
        world: World,
        precision: str,
    ):
        self.config, self.shapes, self.world = config, shapes, world
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        owner_of = owners(shapes, world.size)
        for name, (rows, columns) in shapes.items():
            bounds = [bound for of_rank in spans for bound in of_rank[name] if of_rank[name][0] < of_rank[name][1]]
            assert bounds[::2] == [0, *bounds[1:-1:2]] and bounds[-1] == rows * columns, (name, bounds)
        # What goes to one owner lies together.
        self.spans = {name: spans[world.rank][name] for name in sorted(shapes, key=owner_of.__getitem__)}
        sizes = {name: stop - start for name, (start, stop) in self.spans.items()}
        self.momentum = torch.zeros(sum(sizes.values()), device=world.device)
        self.momenta = dict(zip(sizes, self.momentum.split([*sizes.values()]), strict=True))
        self.batches = batches({name: size for name, size in sizes.items() if size})
        self.owned = [name for name in self.spans if owner_of[name] == world.rank]
        self.owned_batches = batches({name: math.prod(shapes[name]) for name in self.owned})
        self.num_sent = [0] * world.size
        for name, size in sizes.items():
            self.num_sent[owner_of[name]] += size
        sizes_by_rank = [[stop - start for start, stop in map(of_rank.__getitem__, self.owned)] for of_rank in spans]
        self.received_sizes = [size for sizes in sizes_by_rank for size in sizes]
        self.num_received = [sum(sizes) for sizes in sizes_by_rank]

    @torch.no_grad()
    def step(
        self,
        parts: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        learning_rate: float,
        norm: Tensor,
        max_norm: float | None,
    ) -> None:
        """One update of this rank's `parts`, in place, from their gradients. Collective.

        The host does not wait for the norm.

        Args:
            parts, gradients: float32, of any shape; those without elements may be missing.
            norm: global, 0-d. If it is not finite, parts and momenta stay as they were.
            max_norm: what the gradients are clipped to; None leaves them as they are.
        """
        is_finite = torch.isfinite(norm)
        share = is_finite * (1 - self.config.momentum)
        scale = clip_divisor(norm, max_norm).reciprocal() if max_norm else None

        def updates() -> Iterator[Tensor]:
            stop = 0
            for names in self.batches:
                gradient = torch.cat([gradients[name].reshape(-1) for name in names])
                start, stop = stop, stop + len(gradient)
                if scale is not None:
                    gradient *= scale
                gradient.masked_fill_(~is_finite, 0.0)
                momentum = self.momentum[start:stop].lerp_(gradient, share)
                yield gradient.lerp_(momentum, self.config.momentum).to(self.dtype)

        rate = learning_rate * self.config.matrix_rate_ratio * is_finite
        kept = 1 - rate * self.config.weight_decay
        for names, update in zip(self.batches, self._orthogonalised(updates()), strict=True):
            own, changes = [parts[name] for name in names], self._split(names, update.float())
            torch._foreach_mul_(own, kept)
            for shape, same in self._by_shape(changes).items():
                torch._foreach_mul_(same, rate * (0.2 * math.sqrt(max(shape))))
            torch._foreach_sub_(own, [changes[name].view_as(parts[name]) for name in names])

    def _split(self, names: list[str], flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, flat.split([len(self.momenta[name]) for name in names]), strict=True))

    def _by_shape(self, tensors: Mapping[str, T]) -> dict[tuple[int, int], list[T]]:
        """What belongs to each matrix, for all matrices of a shape."""
        found = {}
        for name, tensor in tensors.items():
            found.setdefault(self.shapes[name], []).append(tensor)
        return found

    def _orthogonalised(self, updates: Iterator[Tensor]) -> Iterator[Tensor]:
        """For each batch this rank's parts of the orthogonalised matrices, from its parts of the matrices; flat."""
        if self.world.size == 1:
            for names, update in zip(self.batches, updates, strict=True):
                self._orthogonalise({name: [part] for name, part in self._split(names, update).items()})
                yield update
            return
        sent = torch.cat([torch.empty(0, dtype=self.dtype, device=self.world.device), *updates])
        received = sent.new_empty(sum(self.num_received))
        dist.all_to_all_single(received, sent, self.num_received, self.num_sent)
        parts = received.split(self.received_sizes)
        parts_of = {name: parts[index :: len(self.owned)] for index, name in enumerate(self.owned)}
        for names in self.owned_batches:
            self._orthogonalise({name: parts_of[name] for name in names})
        dist.all_to_all_single(sent, received, self.num_sent, self.num_received)
        yield from sent.split([sum(len(self.momenta[name]) for name in names) for names in self.batches])

    def _orthogonalise(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Overwrites whole matrices, each given as its parts, by the orthogonalised ones."""
        for shape, same in self._by_shape(parts).items():
            every_part = [part for of_matrix in same for part in of_matrix]
            matrices = orthogonalised(torch.cat(every_part).view(-1, *shape), self.dtype)
            torch._foreach_copy_(every_part, matrices.reshape(-1).split([len(part) for part in every_part]))
