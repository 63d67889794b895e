"""Muon inside DeepSpeed's ZeRO: where each matrix's parts lie in the flat tensors that DeepSpeed updates.

DeepSpeed 0.19.8 has a Muon of its own, with other iterations than torch's. It orthogonalises before the gradients are
clipped, so clipping would scale the update itself. So ours takes the place of AdamW's step for the matrices.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.masters import MOMENTUM, Piece, ReadSlice, moment_key, read_elements
from gmlp_scale.engine.muon import Muon, Span
from gmlp_scale.engine.optimizer import MuonConfig


class _Place(NamedTuple):
    """Where this rank's part of a matrix lies."""

    flat_index: int
    """Which flat tensor holds it."""
    offset: int
    """Where it begins in the flat tensor."""
    span: Span
    """Which elements of the flattened matrix it has."""


class ZeroMuon:
    """The matrices' momenta and updates. DeepSpeed's optimizer has the matrices, if any, as its last group.

    Args:
        module: DeepSpeed's engine.
        shapes: the whole matrices' shapes, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        shapes: dict[str, tuple[int, int]],
        config: MuonConfig,
        *,
        stage: int,
        world: World,
        precision: str,
    ):
        zero = module.optimizer  # DeepSpeed's sharding optimizer
        matrices = {name: matrix for name, matrix in module.module.named_parameters() if name in shapes}
        if stage == 3:
            flats = zero.fp32_partitioned_groups_flat
            self.places = {name: _place_in_stage_3(matrix, zero, world) for name, matrix in matrices.items()}
        else:
            flats = zero.optimizer.param_groups[-1]["params"]
            self.places = {name: _place_in_stages_1_and_2(matrix) for name, matrix in matrices.items()}
        self.muons: dict[Tensor, Muon] = {}
        """By flat tensor. Stage 3 has several if the group is large, and steps one after the other."""
        for index in sorted({place.flat_index for place in self.places.values()}):
            own = {name: place.span for name, place in self.places.items() if place.flat_index == index}
            spans = [own] * world.size
            dist.all_gather_object(spans, own)
            self.muons[flats[index]] = Muon(config, {name: shapes[name] for name in own}, spans, world, precision)

    def step(self, optimizer: torch.optim.AdamW, norm: Tensor) -> None:
        """Updates the matrices among what `optimizer` is about to step, and takes their gradients away from it.

        norm: global, of the gradients before they were clipped. If it is not finite, nothing changes.
        """
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if flat in self.muons:
                    muon = self.muons[flat]
                    parts, gradients = self._parts(muon, flat.detach()), self._parts(muon, flat.grad)
                    muon.step(parts, gradients, learning_rate=group["lr"], norm=norm, max_norm=None)
                    flat.grad = None

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """The momenta of whole matrices, on each matrix's owner. Collective."""
        for muon in self.muons.values():
            for name, momentum in muon.whole_momenta():
                yield moment_key(name, MOMENTUM), Piece(momentum, muon.shapes[name], 0)

    def load(self, read: ReadSlice) -> None:
        for muon in self.muons.values():
            for name, momentum in muon.momenta.items():
                momentum.copy_(read_elements(read, moment_key(name, MOMENTUM), muon.shapes[name], *muon.spans[name]))

    def _parts(self, muon: Muon, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat.narrow(0, self.places[name].offset, len(muon.momenta[name])) for name in muon.momenta}


def _place_in_stages_1_and_2(matrix: nn.Parameter) -> _Place:
    if not matrix._hp_mapping:  # this rank holds no part of it
        return _Place(0, 0, (0, 0))
    part, in_flat = matrix._hp_mapping.lp_fragment_address, matrix._hp_mapping.hp_fragment_address
    return _Place(0, in_flat.start, (part.start, part.start + part.numel))


def _place_in_stage_3(matrix: nn.Parameter, zero, world: World) -> _Place:
    flat_index, offset, padded_length = zero.grad_position[zero.get_param_id(matrix)]
    start, stop = (min(rank * padded_length, matrix.ds_numel) for rank in (world.rank, world.rank + 1))
    return _Place(flat_index, offset, (start, stop))
