"""DeepSpeed's ZeRO, stages 1 to 3. Only this file and zero_masters.py import DeepSpeed (0.19.8), and only to run it.

Stage 1 shards masters and moments, stage 2 gradients as well, stage 3 the parameters too.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, Field, FilePath
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.float32_vectors import Vectors, float32_vectors
from gmlp_scale.engine.masters import Masters, Piece, ReadSlice, model_key
from gmlp_scale.engine.muon import muon_matrices
from gmlp_scale.engine.optimizer import (
    OptimizerConfig,
    build_adamw,
    clip_divisor,
    count_left_out,
    decayed_names,
    differentiated,
)
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.engine.zero_masters import ZeroMasters
from gmlp_scale.engine.zero_muon import ZeroMuon
from gmlp_scale.engine.zero_settings import merged_settings, refuse_offload, required_settings

log = logging.getLogger(__name__)


class ZeroConfig(BaseModel, frozen=True, extra="forbid"):
    kind: Literal["zero"] = "zero"
    """DeepSpeed's ZeRO."""
    stage: Literal[1, 2, 3] = 1
    """What is sharded over the ranks: 1 master and moments, 2 gradients too, 3 parameters too."""
    timeout_seconds: float = Field(600, gt=0)
    """How long a collective waits for the other ranks before the run fails. [seconds]"""
    deepspeed_config: FilePath | None = None
    """A DeepSpeed JSON file with settings of your own (bucket sizes, overlap_comm, profilers ...). It must agree with
    what the recipe decides. One that offloads the optimizer (zero_optimization.offload_optimizer) also needs
    "zero_force_ds_cpu_optimizer": false, as DeepSpeed else insists on an AdamW of its own that it compiles."""

    needs_process_group: ClassVar[bool] = True
    supports_cuda_graphs: ClassVar[bool] = True

    def mistakes(self, train: TrainConfig) -> Iterator[str]:
        """What stage 3 cannot do of a `train` section."""
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

    DeepSpeed would round the vectors with all the rest, so it sees a model without them.
    """

    def __init__(
        self, model: nn.Module, config: ZeroConfig, world: World, *, train: TrainConfig, optimizer: OptimizerConfig
    ):
        self.stage = config.stage
        self.world = world
        self.gradient_clipping = optimizer.gradient_clipping
        self.vectors = Vectors(_taken_out(model, float32_vectors(model, train.precision), world), world)
        self.vectors_norm = torch.zeros((), device=world.device)
        self.vector_masters = Masters(self.vectors.masters(), optimizer, decayed=set())
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        initial = {model_key(name): parameter.data for name, parameter in model.named_parameters()}
        matrices = muon_matrices(model, optimizer)
        settings = merged_settings(
            config.deepspeed_config,
            num_parameters=sum(parameter.numel() for parameter in initial.values()),
            required=required_settings(config.stage, world.size, train, optimizer.gradient_clipping),
        )
        if matrices:
            refuse_offload(settings, config.deepspeed_config)
        others = [(name, parameter) for name, parameter in model.named_parameters() if name not in matrices]
        adamw = build_adamw(others, optimizer, decayed_names(model))
        if matrices:
            adamw.add_param_group({"params": [model.get_parameter(name) for name in matrices]})
        self.module = _initialize(model, adamw, settings)
        # DeepSpeed makes its own process group with torch's default timeout.
        self.module.seq_data_parallel_group.set_timeout(timedelta(seconds=config.timeout_seconds))
        self.zero = self.module.optimizer  # DeepSpeed's sharding optimizer, around ours
        self.zero.clip_grad = 0.0  # its norm is without the vectors, so we do it
        self.adamw: torch.optim.AdamW = self.zero.optimizer
        self.adamw.register_step_pre_hook(self._clip_and_update_matrices)
        self.adamw.register_step_post_hook(lambda adamw, *_: count_left_out(adamw))
        # Without matrices it does nothing.
        self.muon = ZeroMuon(self.module, matrices, optimizer, stage=self.stage, world=world, precision=train.precision)
        self.zero_masters = ZeroMasters(self.module, shapes, self.muon, stage=self.stage, world=world)
        if train.precision == "bf16":
            # DeepSpeed made its masters from weights that it had already rounded to bfloat16.
            for name in shapes:
                self.zero_masters.write(name, None, lambda key, first, stop: initial[key][first:stop])

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(is_last)
        self.module.backward(loss, scale_wrt_gas=False)  # the caller has divided it

    @torch.no_grad()
    def step(self, learning_rate: float) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if self.vectors.parameters:
            self.vectors_norm = self.vectors.average_gradients()
        self.module.step()
        norm = self._norm().float()
        self.vector_masters.step(learning_rate, norm)
        self.vectors.clear_gradients()
        return norm

    def differentiate(self, batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        whole = [*self.zero_masters.parameters.values(), *self.vectors.parameters.values()]
        return differentiated(self.module.module(batch), whole)

    @torch.no_grad()
    def predict(self, batch) -> Tensor:
        self.module.eval()
        self._let_modules_read_others(True)
        logits = self.module.module.predict(batch)
        self._let_modules_read_others(False)
        self.module.train()
        return logits

    def state(self) -> Iterator[tuple[str, Piece]]:
        yield from self.zero_masters.pieces()
        yield from self.vector_masters.pieces()
        yield from self.muon.pieces()

    def load_state(self, read: ReadSlice, step: int) -> None:
        self.zero_masters.load(read, step)
        self.vector_masters.load(read, step)
        self.muon.load(read)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.zero_masters.full_weights()
        if self.world.is_main:
            for name, vector in self.vectors.parameters.items():
                yield name, vector.detach().cpu()

    def close(self) -> None:
        self.module.destroy()

    def _norm(self) -> Tensor:
        """The global gradient norm. It is infinite where DeepSpeed gives -1, its mark of a norm that is not finite."""
        others_norm = self.zero._global_grad_norm.to(self.world.device)
        return torch.hypot(torch.where(others_norm < 0, torch.inf, others_norm), self.vectors_norm)

    def _clip_and_update_matrices(self, adamw: torch.optim.AdamW, *_) -> None:
        """Clips by all gradients' norm just before AdamW's step, which is skipped if that norm is not finite.

        Muon updates its matrices here.
        """
        norm = self._norm()
        adamw.found_inf = (~torch.isfinite(norm)).float()
        if self.gradient_clipping is not None:
            scale = clip_divisor(norm, self.gradient_clipping).reciprocal()
            for parameter in (p for group in adamw.param_groups for p in group["params"]):
                parameter.grad.mul_(scale.to(parameter.grad.device))
        self.muon.step(adamw, norm)

    def _let_modules_read_others(self, is_forward: bool) -> None:
        """Lets a module read another's parameter, which stage 3 gathers only inside DeepSpeed's own forward."""
        if self.stage == 3:
            for module in self.module.module.modules():
                module._parameters._in_forward = is_forward


def _taken_out(model: nn.Module, vectors: dict[str, nn.Parameter], world: World) -> dict[str, nn.Parameter]:
    """Makes the vectors plain attributes of their modules, on the device, and returns them."""
    for name, vector in vectors.items():
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        del module._parameters[attribute]
        vector.data = vector.data.to(world.device)
        object.__setattr__(module, attribute, vector)
    return vectors


def _initialize(model: nn.Module, optimizer: torch.optim.AdamW, settings: dict) -> nn.Module:
    """deepspeed.initialize, without what it would compile and print."""
    import deepspeed
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    # No compiled extensions: on a CPU DeepSpeed would build one that only its inference uses.
    deepspeed.ops.__compatible_ops__ = {}
    # The host would wait for every step's norm to know whether it is finite. AdamW and Muon know without it.
    for module in (bf16_optimizer, stage_1_and_2, stage3):
        module.is_invalid_grad_norm = lambda norm: False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # stage 1 in bf16 prints memory reports
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    log.debug("deepspeed.initialize: %s", printed.getvalue())
    return engine
