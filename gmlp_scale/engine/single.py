"""One process on one device: the reference that the other engines are held to."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from gmlp_scale.engine.masters import Master, Masters, Piece, ReadRows
from gmlp_scale.world import World


class SingleConfig(BaseModel, frozen=True, extra="forbid"):
    """One process, CPU or one GPU."""

    kind: Literal["single"] = "single"
    timeout_seconds: float = 600
    """Has no effect in one process; every engine has it, so that an override of engine.kind alone is a valid run."""


class SingleEngine:
    """In bf16 the module holds bfloat16 copies of the float32 masters, and gradients are summed in float32."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        build_optimizer: Callable,
        precision: Literal["float32", "bf16"],
        num_micro_batches: int,
        gradient_clipping: float | None,
    ):
        if world.size > 1:
            raise ValueError(
                f"engine.kind=single runs in one process, but {world.size} were started: "
                "start it without torchrun or deepspeed, or set engine.kind to zero or fsdp2"
            )
        self.module = model.to(world.device)
        self.num_micro_batches = num_micro_batches
        self.copies: dict[str, nn.Parameter] = {}  # the module's bfloat16 parameters
        masters = {}
        for name, parameter in model.named_parameters():
            rows = parameter
            if precision == "bf16":
                rows = nn.Parameter(parameter.detach().clone())
                parameter.data = parameter.data.bfloat16()
                parameter.register_post_accumulate_grad_hook(_adds_gradient_to(rows))
                self.copies[name] = parameter
            masters[name] = Master(rows, tuple(parameter.shape), 0)
        self.masters = Masters(masters, build_optimizer, gradient_clipping)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        (loss / self.num_micro_batches).backward()

    def step(self, learning_rate: float) -> Tensor:
        norm = get_total_norm([m.rows.grad for m in self.masters.masters.values() if m.rows.grad is not None])
        self.masters.step(learning_rate, norm)
        self._refresh_copies()
        return norm

    @torch.no_grad()
    def predict(self, batch) -> Tensor:
        self.module.eval()
        logits = self.module.predict(batch)
        self.module.train()
        return logits

    def state(self) -> Iterator[tuple[str, Piece]]:
        return self.masters.pieces()

    def load_state(self, read: ReadRows, step: int) -> None:
        self.masters.load(read, step)
        self._refresh_copies()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.masters.masters.items():
            yield name, master.rows.detach().cpu()

    def close(self) -> None:
        """Nothing to end."""

    @torch.no_grad()
    def _refresh_copies(self) -> None:
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), [self.masters.masters[name].rows for name in self.copies])


def _adds_gradient_to(master: nn.Parameter) -> Callable[[nn.Parameter], None]:
    def hook(parameter: nn.Parameter) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
