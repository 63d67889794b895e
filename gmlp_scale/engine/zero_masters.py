"""The float32 masters and AdamW's moments inside DeepSpeed's ZeRO: how a checkpoint reads and writes them.

`single` and `fsdp2` have masters.Masters for this. DeepSpeed cuts and updates its masters itself.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.masters import MOMENTS, Piece, ReadSlice, model_key, moment_key, read_elements
from gmlp_scale.engine.optimizer import create_moments
from gmlp_scale.engine.zero_muon import ZeroMuon


class ZeroMasters:
    """The masters of all parameters that DeepSpeed knows, and the moments of those that AdamW updates.

    Args:
        module: DeepSpeed's engine.
        shapes: the whole parameters' shapes, by name.
        muon: the matrices that Muon updates. It keeps their momenta.
    """

    def __init__(
        self, module: nn.Module, shapes: dict[str, tuple[int, ...]], muon: ZeroMuon, *, stage: int, world: World
    ):
        self.stage, self.shapes, self.world = stage, shapes, world
        self.parameters = dict(module.module.named_parameters())
        self.zero = module.optimizer
        self.adamw: torch.optim.AdamW = self.zero.optimizer
        self.moments = {name: () if name in muon.places else MOMENTS for name in self.parameters}
        self._create_moments(muon)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Whole tensors, each from one rank. Every rank must run it to its end."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        owners = self._owners()
        for name, parameter in self.parameters.items():
            # Each of these calls gathers on all ranks.
            tensors = {model_key(name): safe_get_full_fp32_param(parameter)}
            for moment in self.moments[name]:
                tensors[moment_key(name, moment)] = safe_get_full_optimizer_state(parameter, moment)
            if owners[name] == self.world.rank:
                for key, tensor in tensors.items():
                    yield key, Piece(tensor, self.shapes[name], 0)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole master on the CPU) on rank 0. Every rank must run it to its end."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.parameters.items():
            full = safe_get_full_fp32_param(parameter)
            if self.world.is_main:
                yield name, full.cpu()

    def load(self, read: ReadSlice, step: int) -> None:
        """Reads masters and moments, sets AdamW's step count and refreshes the weights that the model computes with."""
        for name in self.parameters:
            for moment in (None, *self.moments[name]):
                self.write(name, moment, read)
        for state in self.adamw.state.values():
            state["step"].fill_(step)
        self._refresh_weights()

    @torch.no_grad()
    def write(self, name: str, moment: str | None, read: ReadSlice) -> None:
        """Reads this rank's part of a master, or of its `moment`, and writes it into DeepSpeed's."""
        key = moment_key(name, moment) if moment else model_key(name)
        parameter, shape = self.parameters[name], self.shapes[name]
        if self.stage == 3:
            # safe_set_full_* fails where the ranks do not divide the parameter (stage3.py, set_full_hp_param).
            # safe_set_local_* takes the rank's part with its padding.
            from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

            padded = torch.zeros(parameter.ds_tensor.numel())
            start = len(padded) * self.world.rank
            values = read_elements(read, key, shape, start, min(start + len(padded), math.prod(shape)))
            padded[: len(values)] = values
            if moment:
                safe_set_local_optimizer_state(parameter, padded, moment)
            else:
                safe_set_local_fp32_param(parameter, padded)
        elif mapping := parameter._hp_mapping:  # None where this rank holds no part of it
            address = mapping.lp_fragment_address
            values = read_elements(read, key, shape, address.start, address.start + address.numel)
            mapping.get_hp_fragment(moment).copy_(values)

    def _create_moments(self, muon: ZeroMuon) -> None:
        """DeepSpeed would create them at the first step, but state and load_state come earlier."""
        if self.stage == 3:
            flats = self.zero.fp32_partitioned_groups_flat
        else:
            flats = [flat for group in self.adamw.param_groups for flat in group["params"]]
        create_moments(self.adamw, [flat for flat in flats if flat not in muon.muons])
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()  # which makes an empty state for each other one
            for flat in muon.muons:
                del self.adamw.state[flat]

    def _owners(self) -> dict[str, int]:
        """The rank that gives each parameter to a checkpoint: always the one with the fewest elements so far."""
        sizes = [0] * self.world.size
        owners = {}
        for name, shape in self.shapes.items():
            owners[name] = sizes.index(min(sizes))
            sizes[owners[name]] += math.prod(shape)
        return owners

    def _refresh_weights(self) -> None:
        """Copies the masters to the weights that the model computes with, as DeepSpeed does after a step."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.zero.persistent_parameters:  # small ones, gathered all the time
            persistent[0].all_gather(persistent)
