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
from collections.abc import Iterable, Mapping

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


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V' of a matrix U S V': five Newton-Schulz iterations in `dtype` bring all singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.to(dtype)
    is_tall = wide.shape[0] > wide.shape[1]
    if is_tall:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


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
        self.momenta = {
            name: torch.zeros(stop - start, device=world.device) for name, (start, stop) in self.spans.items()
        }
        self.owned = [name for name in self.spans if owner_of[name] == world.rank]
        self.num_sent = [0] * world.size
        for name, momentum in self.momenta.items():
            self.num_sent[owner_of[name]] += len(momentum)
        sizes = [{name: stop - start for name, (start, stop) in of_rank.items()} for of_rank in spans]
        self.received_sizes = [of_rank[name] for of_rank in sizes for name in self.owned]
        self.num_received = [sum(of_rank[name] for name in self.owned) for of_rank in sizes]

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
        """One update of this rank's `parts`, in place, from their gradients, which it overwrites. Collective.

        The host does not wait for the norm.

        Args:
            parts, gradients: float32, of any shape; those without elements may be missing.
            norm: global, 0-d. If it is not finite, parts and momenta stay as they were.
            max_norm: what the gradients are clipped to; None leaves them as they are.
        """
        is_finite = torch.isfinite(norm)
        share = is_finite * (1 - self.config.momentum)
        scale = clip_divisor(norm, max_norm).reciprocal() if max_norm else None
        updates = []
        for name, momentum in self.momenta.items():
            gradient = gradients[name].reshape(-1) if len(momentum) else momentum
            if scale is not None:
                gradient *= scale
            gradient.masked_fill_(~is_finite, 0.0)
            momentum.lerp_(gradient, share)
            updates.append(gradient.lerp_(momentum, self.config.momentum))
        rate = learning_rate * self.config.matrix_rate_ratio * is_finite
        kept = 1 - rate * self.config.weight_decay
        for name, update in zip(self.momenta, self._orthogonalised(updates), strict=True):
            if len(update):
                part = parts[name]
                part *= kept
                part -= update.view_as(part).float() * (rate * (0.2 * math.sqrt(max(self.shapes[name]))))

    def _orthogonalised(self, updates: list[Tensor]) -> Iterable[Tensor]:
        """This rank's parts of the orthogonalised matrices, from its parts of the matrices; all flattened."""
        if self.world.size == 1:
            whole = (update.view(self.shapes[name]) for name, update in zip(self.spans, updates, strict=True))
            return (orthogonalised(matrix, self.dtype).reshape(-1) for matrix in whole)
        sent = torch.cat([update.to(self.dtype) for update in updates])
        received = sent.new_empty(sum(self.num_received))
        dist.all_to_all_single(received, sent, self.num_received, self.num_sent)
        every_part = received.split(self.received_sizes)
        for index, name in enumerate(self.owned):
            parts = every_part[index :: len(self.owned)]
            matrix = orthogonalised(torch.cat(parts).view(self.shapes[name]), self.dtype)
            torch._foreach_copy_(parts, matrix.reshape(-1).split([len(part) for part in parts]))
        dist.all_to_all_single(sent, received, self.num_sent, self.num_received)
        return sent.split([len(update) for update in updates])
