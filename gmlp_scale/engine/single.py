"""One process on one device. The tests compare the other engines with this one."""

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.adamw import decayed_names
from gmlp_scale.engine.computing import BLOCKS_PER_GROUP
from gmlp_scale.engine.float32_vectors import Vectors, float32_vectors
from gmlp_scale.engine.gradients import differentiated, global_norm
from gmlp_scale.engine.masters import Masters, Piece, ReadSlice
from gmlp_scale.engine.muon import Muon, muon_matrices
from gmlp_scale.engine.optimizer import OptimizerConfig
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.fields import Timeout


class SingleConfig(BaseModel, frozen=True, extra="forbid"):
    """One process, CPU or one GPU."""

    kind: Literal["single"] = "single"
    """The reference: one process, without sharding."""
    timeout_seconds: Timeout = 600
    """How long to wait for the other ranks, of which one process has none. Every engine takes it, so that overriding
    engine.kind alone gives a valid recipe. [seconds]"""

    needs_process_group: ClassVar[bool] = False
    blocks_per_group: ClassVar[int] = BLOCKS_PER_GROUP

    def mistakes(self, train: TrainConfig) -> Iterator[str]:
        """None: this engine can do all that a `train` section asks for."""
        yield from ()


class SingleEngine:
    """In bf16 the module holds bfloat16 copies of the float32 masters, of all but the vectors. Gradients add up in
    float32."""

    def __init__(self, model: nn.Module, world: World, *, train: TrainConfig, optimizer: OptimizerConfig):
        assert world.size == 1
        self.module = model.to(world.device)
        self.copies: dict[str, nn.Parameter] = {}  # the module's bfloat16 parameters
        vectors = Vectors(float32_vectors(model, train.precision), world)
        masters = {}
        for name, parameter in model.named_parameters():
            if name in vectors.parameters:
                continue
            master = parameter
            if train.precision == "bf16":
                master = nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.bfloat16()
                parameter.register_post_accumulate_grad_hook(_adds_gradient_to(master))
                self.copies[name] = parameter
            masters[name] = Piece(master, tuple(parameter.shape), 0)
        shapes = muon_matrices(model, optimizer)
        whole = {name: (0, math.prod(shape)) for name, shape in shapes.items()}
        muon = Muon(optimizer, shapes, [whole], world, train.precision) if shapes else None
        self.masters = Masters(vectors, masters, optimizer, decayed_names(model), muon)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float) -> Tensor:
        norm = global_norm([m.tensor.grad for m in self.masters.masters.values() if m.tensor.grad is not None])
        self.masters.step(learning_rate, norm)
        self._refresh_copies()
        return norm

    def differentiate(self, batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        return differentiated(self.module(batch), self.module.parameters())

    @torch.no_grad()
    def predict(self, batch) -> Tensor:
        self.module.eval()
        logits = self.module.predict(batch)
        self.module.train()
        return logits

    def state(self) -> Iterator[tuple[str, Piece]]:
        return self.masters.state()

    def load_state(self, read: ReadSlice, step: int) -> None:
        self.masters.load(read, step)
        self._refresh_copies()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.masters.masters.items():
            yield name, master.tensor.detach().cpu()

    def close(self) -> None:
        """Does nothing: one process has no group to leave."""

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self.copies:
            masters = [self.masters.masters[name].tensor for name in self.copies]
            torch._foreach_copy_(list(self.copies.values()), masters)


def _adds_gradient_to(master: nn.Parameter) -> Callable[[nn.Parameter], None]:
    def hook(parameter: nn.Parameter) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
