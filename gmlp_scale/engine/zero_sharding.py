"""DeepSpeed 0.19.8 from inside. Only this file imports DeepSpeed, and knows what it does not document."""

import contextlib
import io
import logging
import warnings
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.adamw import Adamw
from gmlp_scale.engine.muon import Span

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where this rank's part of a parameter lies."""

    flat: Tensor
    """The float32 tensor that holds it, which DeepSpeed updates."""
    offset: int
    """Where it begins there."""
    span: Span
    """Which elements of the flattened parameter it has."""


class ShardedModel:
    """A model whose parameters, masters and moments DeepSpeed shards, with the AdamW that updates the masters.

    Args:
        adamw: over the model's parameters. DeepSpeed replaces a group's by one flat tensor, or by several at stage 3.
            Matrices that Muon updates are the last group.
        settings: DeepSpeed's JSON.
        timeout_seconds: of the process group that DeepSpeed makes, which else has torch's default.
    """

    def __init__(self, model: nn.Module, adamw: Adamw, settings: dict, world: World, *, timeout_seconds: float):
        self.stage, self.world = settings["zero_optimization"]["stage"], world
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        group_of = {parameter: index for index, group in enumerate(adamw.param_groups) for parameter in group["params"]}
        self._linear = F.linear
        self.module = _initialize(model, adamw, settings)
        self.module.seq_data_parallel_group.set_timeout(timedelta(seconds=timeout_seconds))
        self.parameters = dict(self.module.module.named_parameters())
        self.zero = self.module.optimizer  # DeepSpeed's sharding optimizer, around AdamW
        self.zero.clip_grad = 0.0  # its norm is without the vectors, so ZeroEngine does it
        self.adamw: Adamw = self.zero.optimizer
        if self.stage == 3:
            self.flats = self.zero.fp32_partitioned_groups_flat
        else:
            self.flats = [flat for group in self.adamw.param_groups for flat in group["params"]]
        self.places = {name: self._place(parameter, group_of) for name, parameter in self.parameters.items()}

    def close(self) -> None:
        """Ends DeepSpeed's engine and gives the process torch's own F.linear back, which stage 3 replaces for every
        model."""
        self.module.destroy()
        F.linear = self._linear

    def norm(self) -> Tensor:
        """The global norm of its gradients. It is infinite where DeepSpeed gives -1, its mark of one that is not
        finite."""
        norm = self.zero._global_grad_norm.to(self.world.device)
        return torch.where(norm < 0, torch.inf, norm)

    def create_moments(self, without: Collection[Tensor]) -> None:
        """DeepSpeed would create AdamW's moments at the first step. without: flat tensors that get none."""
        self.adamw.create_moments(flat for flat in self.flats if flat not in without)

    def whole(self, name: str) -> Tensor:
        """A whole master. All ranks call it together."""
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(self.parameters[name])

    def part(self, name: str, moment: str | None = None) -> Tensor:
        """This rank's part of a master, or of its `moment`: the elements of its place's span, as a view."""
        flat, offset, (start, stop) = self.places[name]
        return (self.adamw.state[flat][moment] if moment else flat).detach().narrow(0, offset, stop - start)

    def refresh_weights(self) -> None:
        """Copies the masters to the weights that the model computes with, as DeepSpeed does after a step."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        if persistent := self.zero.persistent_parameters:  # small ones, gathered all the time
            persistent[0].all_gather(persistent)

    def let_modules_read_others(self, is_forward: bool) -> None:
        """Lets a module read another's parameter, which stage 3 gathers only inside DeepSpeed's own forward."""
        if self.stage == 3:
            for module in self.module.module.modules():
                module._parameters._in_forward = is_forward

    def _place(self, parameter: nn.Parameter, group_of: dict[nn.Parameter, int]) -> Place:
        if self.stage == 3:
            flat_index, offset, padded_length = self.zero.grad_position[self.zero.get_param_id(parameter)]
            rank = self.world.rank
            start, stop = (min(index * padded_length, parameter.ds_numel) for index in (rank, rank + 1))
            return Place(self.flats[flat_index], offset, (start, stop))
        flat, mapping = self.flats[group_of[parameter]], parameter._hp_mapping
        if not mapping:  # this rank holds no part of it
            return Place(flat, 0, (0, 0))
        part, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Place(flat, in_flat.start, (part.start, part.start + part.numel))


def _initialize(model: nn.Module, optimizer: torch.optim.AdamW, settings: dict) -> nn.Module:
    """deepspeed.initialize, without what it would compile and print."""
    import deepspeed
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    # No compiled extensions: on a CPU DeepSpeed would build one that only its inference uses.
    deepspeed.ops.__compatible_ops__ = {}
    # The host would wait for every step's norm to know whether it is finite. AdamW and Muon know without it.
    for module in (bf16_optimizer, stage_1_and_2, stage3):
        module.is_invalid_grad_norm = lambda norm: False
    ZERO_SUPPORTED_OPTIMIZERS.append(Adamw)  # it would warn of a subclass of torch's AdamW
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # stage 1 in bf16 prints memory reports
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    log.debug("deepspeed.initialize: %s", printed.getvalue())
    return engine
