"""Engines: how a model is spread over the ranks, differentiated and updated.

`single` is the reference; `zero` (DeepSpeed, stages 1 to 3) and `fsdp2` give its losses and gradient norms.
An engine knows a model by `.blocks`, `.groups`, `.encode`, `.set_recompute`, `.group_blocks`, `forward(batch) -> loss`
and `predict(batch)` alone.

Beside its fields, an engine's config has
    needs_process_group    whether it needs one even for a single process
    blocks_per_group       how many blocks run as one module
    mistakes(train)        a line for each field of a `train` section that it cannot do, worded as in config.py
"""

from collections.abc import Iterator
from typing import Annotated, Protocol, assert_never

from pydantic import Field
from torch import Tensor, nn

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.computing import compute_repeatably, set_up_blocks
from gmlp_scale.engine.fsdp2 import Fsdp2Config, Fsdp2Engine
from gmlp_scale.engine.masters import Piece, ReadSlice
from gmlp_scale.engine.optimizer import OptimizerConfig
from gmlp_scale.engine.single import SingleConfig, SingleEngine
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.engine.zero import ZeroConfig, ZeroEngine

EngineConfig = Annotated[SingleConfig | ZeroConfig | Fsdp2Config, Field(discriminator="kind")]

ENGINES: dict[str, EngineConfig] = {
    "single": SingleConfig(),
    "fsdp2": Fsdp2Config(),
    "fsdp2, reshard_after_forward": Fsdp2Config(reshard_after_forward=True),
    "zero, stage 1": ZeroConfig(stage=1),
    "zero, stage 2": ZeroConfig(stage=2),
    "zero, stage 3": ZeroConfig(stage=3),
}
"""What plans, benchmarks, the GPU proof and the tests go through."""
SHARDED_ENGINES = {name: engine for name, engine in ENGINES.items() if engine.needs_process_group}
SHARDED_KINDS = " or ".join(dict.fromkeys(engine.kind for engine in SHARDED_ENGINES.values()))


def engine_overrides(engine: EngineConfig) -> list[str]:
    """The words that a command takes for this engine: engine.kind and the fields that were given to it."""
    given = {"kind": engine.kind} | engine.model_dump(exclude_unset=True)
    return [f"engine.{field}={value}" for field, value in given.items()]


class Engine(Protocol):
    """Every method is called by all ranks together."""

    module: nn.Module
    """Call it with a batch for the loss of this rank's micro-batch."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradient of `loss`: a micro-batch's loss, divided by the number of micro-batches in the step.

        is_last: this is the step's last micro-batch.
        """

    def step(self, learning_rate: float) -> Tensor:
        """One update. Returns the global gradient norm before clipping, 0-d float32.

        A norm that is not finite leaves parameters and moments as they were, on every rank. The step still counts.
        """

    def differentiate(self, batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The loss of one micro-batch, the whole parameters that it was computed with, and the gradients of this loss.

        They are this rank's alone: nothing is reduced. The next step does not notice the call. Not for ZeRO 3.
        """

    def predict(self, batch) -> Tensor:
        """The model's logits without gradients and without dropout."""

    def state(self) -> Iterator[tuple[str, Piece]]:
        """This rank's pieces of model.<name> and optimizer.<name>.exp_avg and .exp_avg_sq (AdamW) or .momentum (Muon).

        Together, the ranks' pieces hold every element once. Nothing is sent between the ranks.
        """

    def load_state(self, read: ReadSlice, step: int) -> None:
        """Reads masters and their states with `read`, refreshes the bfloat16 weights and sets AdamW's step count."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole float32 parameter on the CPU), one at a time on rank 0; nothing on the other ranks.

        Every rank must run it to its end.
        """

    def close(self) -> None:
        """To be called before the world is stopped."""


def build_engine(
    model: nn.Module, world: World, *, engine: EngineConfig, train: TrainConfig, optimizer: OptimizerConfig
) -> Engine:
    """Applies recompute, compilation and sharding in the one order that works, and returns the engine.

    Args:
        model: float32, on the CPU, with the same weights on every rank.
        train: with a number as its micro_batch_size, and float32 or bf16 as its precision.

    Raises:
        InputError: a DeepSpeed file contradicts the recipe, or `train.compile` is reduce-overhead on a CPU.
    """
    assert train.precision != "auto"
    if train.recheck_every_steps and world.device.type == "cuda":
        compute_repeatably()
    set_up_blocks(model, train, world.device, engine.blocks_per_group)
    # An engine shards, which replaces the parameters, and then builds its optimizer over those that each rank updates.
    match engine:
        case SingleConfig():
            return SingleEngine(model, world, train=train, optimizer=optimizer)
        case ZeroConfig():
            return ZeroEngine(model, engine, world, train=train, optimizer=optimizer)
        case Fsdp2Config():
            return Fsdp2Engine(model, engine, world, train=train, optimizer=optimizer)
    assert_never(engine)
