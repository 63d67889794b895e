"""DeepSpeed's ZeRO, stages 1 to 3. Only zero_sharding.py knows DeepSpeed's inside."""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, FilePath
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.adamw import MOMENTS, Adamw, decayed_names
from gmlp_scale.engine.computing import BLOCKS_PER_GROUP
from gmlp_scale.engine.float32_vectors import Vectors, float32_vectors
from gmlp_scale.engine.gradients import clip_divisor, differentiated
from gmlp_scale.engine.masters import MOMENTUM, Masters, Piece, ReadSlice, load, model_key, moment_key
from gmlp_scale.engine.muon import Muon, muon_matrices
from gmlp_scale.engine.optimizer import OptimizerConfig
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.engine.zero_settings import deepspeed_settings, read_own
from gmlp_scale.engine.zero_sharding import ShardedModel
from gmlp_scale.errors import InputError
from gmlp_scale.fields import OfOneMachine, Timeout


class ZeroConfig(BaseModel, frozen=True, extra="forbid"):
    kind: Literal["zero"] = "zero"
    """DeepSpeed's ZeRO."""
    stage: Literal[1, 2, 3] = 1
    """What is sharded over the ranks: 1 master and moments, 2 gradients too, 3 parameters too."""
    timeout_seconds: Timeout = 600
    """How long a collective waits for the other ranks before the run fails. [seconds]"""
    deepspeed_config: OfOneMachine[FilePath | None] = None
    """A DeepSpeed JSON file with settings of your own (bucket sizes, overlap_comm, profilers ...). It must agree with
    what the recipe decides. One that offloads the optimizer (zero_optimization.offload_optimizer) also needs
    "zero_force_ds_cpu_optimizer": false, as DeepSpeed else insists on an AdamW of its own that it compiles."""

    needs_process_group: ClassVar[bool] = True

    @property
    def blocks_per_group(self) -> int:
        """Stage 3 has no groups: DeepSpeed would put its hooks on a block twice, as it finds the block twice."""
        return 1 if self.stage == 3 else BLOCKS_PER_GROUP

    def mistakes(self, train: TrainConfig) -> Iterator[str]:
        """What is wrong with the DeepSpeed file by itself, and what stage 3 cannot do of a `train` section."""
        if self.deepspeed_config:
            try:
                read_own(self.deepspeed_config)
            except InputError as error:
                yield f"engine.deepspeed_config: {error}"
        if self.stage < 3:
            return
        if train.compile:
            yield (
                f"train.compile: found {str(train.compile).lower()}; needed: false with engine.stage=3, whose hooks "
                "break every compiled block"
            )
        if train.recompute == "selective":
            # With DeepSpeed's own F.linear the kept product would get its bias twice, and gradients would be wrong.
            yield (
                "train.recompute: found selective; needed: none or full with engine.stage=3, whose linear layers add "
                "their bias in place to the very result that selective keeps"
            )
        if train.recheck_every_steps:
            yield (
                f"train.recheck_every_steps: found {train.recheck_every_steps}; needed: null with engine.stage=3, "
                "which holds no parameter whole while it differentiates"
            )


class ZeroEngine:
    """Works with one process too. In bf16 masters are float32, and gradients add up and are reduced in float32.

    DeepSpeed would round the vectors with all the rest, so it sees a model without them. Its own Muon has other
    iterations than torch's and orthogonalises before the gradients are clipped, so clipping would scale the update
    itself. So ours takes the place of AdamW's step for the matrices.
    """

    def __init__(
        self, model: nn.Module, config: ZeroConfig, world: World, *, train: TrainConfig, optimizer: OptimizerConfig
    ):
        self.world = world
        self.gradient_clipping = optimizer.gradient_clipping
        self.vectors = Vectors(_taken_out(model, float32_vectors(model, train.precision), world), world)
        self.vectors_norm = torch.zeros((), device=world.device)
        self.vector_masters = Masters(self.vectors, {}, optimizer, decayed=set())
        parameters, matrices = dict(model.named_parameters()), muon_matrices(model, optimizer)
        settings = deepspeed_settings(
            config.deepspeed_config,
            stage=config.stage,
            num_parameters=sum(parameter.numel() for parameter in parameters.values()),
            world_size=world.size,
            train=train,
            optimizer=optimizer,
        )
        in_adamw = [(name, parameter) for name, parameter in parameters.items() if name not in matrices]
        adamw = Adamw(in_adamw, optimizer, decayed_names(model))
        if matrices:
            adamw.add_param_group({"params": [parameters[name] for name in matrices]})
        initial = {name: parameter.data for name, parameter in parameters.items()}
        self.sharded = ShardedModel(model, adamw, settings, world, timeout_seconds=config.timeout_seconds)
        self.module, self.adamw = self.sharded.module, self.sharded.adamw
        self.adamw.register_step_pre_hook(self._clip_and_update_matrices)
        self.muons = self._build_muons(matrices, optimizer, train.precision)
        self.sharded.create_moments(without=self.muons)
        if train.precision == "bf16":
            # DeepSpeed made its masters from weights that it had already rounded to bfloat16.
            for name, weights in initial.items():
                self.sharded.part(name).copy_(weights.flatten()[slice(*self.sharded.places[name].span)])

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(is_last)
        self.module.backward(loss, scale_wrt_gas=False)  # the caller has divided it

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.num_steps += 1  # once for all groups, which DeepSpeed steps one by one
        if self.vectors.parameters:
            self.vectors_norm = self.vectors.average_gradients()
        self.module.step()
        norm = self._norm().float()
        self.vector_masters.step(learning_rate, norm)
        return norm

    def differentiate(self, batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        whole = [*self.sharded.parameters.values(), *self.vectors.parameters.values()]
        return differentiated(self.module.module(batch), whole)

    @torch.no_grad()
    def predict(self, batch) -> Tensor:
        self.module.eval()
        self.sharded.let_modules_read_others(True)
        logits = self.module.module.predict(batch)
        self.sharded.let_modules_read_others(False)
        self.module.train()
        return logits

    def state(self) -> Iterator[tuple[str, Piece]]:
        yield from self._pieces()
        yield from self.vector_masters.state()

    def load_state(self, read: ReadSlice, step: int) -> None:
        load(self._pieces(), read)
        self.adamw.num_steps.fill_(step)
        self.sharded.refresh_weights()
        self.vector_masters.load(read, step)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.sharded.shapes:
            full = self.sharded.whole(name)
            if self.world.is_main:
                yield name, full.cpu()
        if self.world.is_main:
            for name, vector in self.vectors.parameters.items():
                yield name, vector.detach().cpu()

    def close(self) -> None:
        self.sharded.close()

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        """This rank's elements of what DeepSpeed shards: masters, AdamW's moments, Muon's momenta."""
        momenta = {name: momentum for muon in self.muons.values() for name, momentum in muon.momenta.items()}
        for name, shape in self.sharded.shapes.items():
            start, stop = self.sharded.places[name].span
            if start == stop:
                continue
            yield model_key(name), Piece(self.sharded.part(name), shape, start)
            if name in momenta:
                yield moment_key(name, MOMENTUM), Piece(momenta[name], shape, start)
            else:
                for moment in MOMENTS:
                    yield moment_key(name, moment), Piece(self.sharded.part(name, moment), shape, start)

    def _norm(self) -> Tensor:
        """The global norm of all gradients."""
        return torch.hypot(self.sharded.norm(), self.vectors_norm)

    def _build_muons(
        self, matrices: dict[str, tuple[int, int]], optimizer: OptimizerConfig, precision: str
    ) -> dict[Tensor, Muon]:
        """By the flat tensor that holds the matrices' parts. Stage 3 has several of them if the matrices are large."""
        muons, places = {}, self.sharded.places
        for flat in self.sharded.flats:
            shapes = {name: shape for name, shape in matrices.items() if places[name].flat is flat}
            if shapes:
                spans = [{}] * self.world.size
                dist.all_gather_object(spans, {name: places[name].span for name in shapes})
                muons[flat] = Muon(optimizer, shapes, spans, self.world, precision)
        return muons

    def _clip_and_update_matrices(self, adamw: Adamw, *_) -> None:
        """Clips by all gradients' norm just before AdamW's step, which is skipped if that norm is not finite.

        Then Muon updates the matrices among what `adamw` is about to step, and takes their gradients away from it.
        """
        norm = self._norm()
        adamw.found_inf = (~torch.isfinite(norm)).float().to(adamw.num_steps.device)
        flats = [flat for group in adamw.param_groups for flat in group["params"]]
        if self.gradient_clipping is not None:
            scale = clip_divisor(norm, self.gradient_clipping).reciprocal()
            for flat in flats:
                flat.grad.mul_(scale.to(flat.grad.device))
        for flat in flats:
            if muon := self.muons.get(flat):
                parts = {name: self.sharded.part(name) for name in muon.momenta}
                offsets = {name: self.sharded.places[name].offset for name in muon.momenta}
                gradients = {name: flat.grad.narrow(0, offsets[name], len(part)) for name, part in parts.items()}
                learning_rate = adamw.param_groups[0]["lr"]  # of all groups
                muon.step(parts, gradients, learning_rate=learning_rate, norm=norm, max_norm=None)
                flat.grad = None


def _taken_out(model: nn.Module, vectors: dict[str, nn.Parameter], world: World) -> dict[str, nn.Parameter]:
    """Makes the vectors plain attributes of their modules, on the device, and returns them."""
    for name, vector in vectors.items():
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        del module._parameters[attribute]
        vector.data = vector.data.to(world.device)
        object.__setattr__(module, attribute, vector)
    return vectors
