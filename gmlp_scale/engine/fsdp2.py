"""PyTorch's fully sharded data parallelism: fully_shard cuts parameters, gradients and moments along dimension 0.

torch.distributed.fsdp is slow to import, so only building an engine imports it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gmlp_scale.distributed.world import World
from gmlp_scale.engine.adamw import decayed_names
from gmlp_scale.engine.computing import BLOCKS_PER_GROUP
from gmlp_scale.engine.float32_vectors import Vectors, float32_vectors
from gmlp_scale.engine.gradients import differentiated, global_norm
from gmlp_scale.engine.masters import Masters, Piece, ReadSlice
from gmlp_scale.engine.muon import Muon, Span, muon_matrices
from gmlp_scale.engine.optimizer import OptimizerConfig
from gmlp_scale.engine.train_config import TrainConfig
from gmlp_scale.fields import Count, Timeout


class Fsdp2Config(BaseModel, frozen=True, extra="forbid"):
    kind: Literal["fsdp2"] = "fsdp2"
    """PyTorch's fully_shard."""
    timeout_seconds: Timeout = 600
    """How long a collective waits for the other ranks before the run fails. [seconds]"""
    blocks_per_group: Count = BLOCKS_PER_GROUP
    """How many blocks to gather together, and on a GPU to compile together. One block alone is so small that latency
    would decide. [blocks]"""
    reshard_after_forward: bool = False
    """True frees a group's gathered parameters after its forward pass and gathers them again for the backward pass
    (ZeRO-3). False shards only gradients, masters and moments between steps (ZeRO-2), and gathers parameters to the
    same memory in every step."""

    needs_process_group: ClassVar[bool] = True

    def mistakes(self, train: TrainConfig) -> Iterator[str]:
        """CUDA graphs read parameters where they were recorded, and one that was freed is gathered elsewhere."""
        if self.reshard_after_forward and train.compile == "reduce-overhead":
            yield "train.compile: found reduce-overhead; needed: true or false with engine.reshard_after_forward=true"


class Fsdp2Engine:
    """Works with one process too. In bf16, gathers are in bfloat16 and gradients are reduced in float32; the vectors
    stay in float32, whole on every rank."""

    def __init__(
        self, model: nn.Module, config: Fsdp2Config, world: World, *, train: TrainConfig, optimizer: OptimizerConfig
    ):
        self.config = config
        self.world = world
        decayed, matrices = decayed_names(model), muon_matrices(model, optimizer)
        if next(model.parameters()).device != world.device:  # torch cannot move fake tensors
            model.to(world.device)
        self.vectors = Vectors(float32_vectors(model, train.precision), world)
        self.module = _shard(model, self.vectors, config, world, train.precision)
        self.groups = [*(model.groups or model.blocks), self.module]  # what is gathered together
        masters = {}
        self.shards: list[tuple[nn.Parameter, nn.Parameter]] = []  # the module's parameters and their masters
        for name, parameter in self.module.named_parameters():
            if name in self.vectors.parameters:
                continue
            tensor = parameter.detach().to_local()  # the same memory, without DTensor's cost per operation
            if len(tensor):
                first = _first_index(len(parameter), world.rank, world.size)
                masters[name] = Piece(nn.Parameter(tensor), tuple(parameter.shape), first)
                self.shards.append((parameter, masters[name].tensor))
        spans = [_spans(matrices, rank, world.size) for rank in range(world.size)]
        muon = Muon(optimizer, matrices, spans, world, train.precision) if matrices else None
        self.masters = Masters(self.vectors, masters, optimizer, decayed, muon)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.module.set_is_last_backward(is_last)
        for group in self.groups:
            group.set_requires_gradient_sync(is_last, recurse=False)
            group.set_reshard_after_backward(is_last or self.config.reshard_after_forward, recurse=False)
        loss.backward()

    @torch.no_grad()  # which DTensor would record at 16 ms a step with 144 blocks
    def step(self, learning_rate: float) -> Tensor:
        for parameter, master in self.shards:
            if parameter.grad is not None:
                master.grad = parameter.grad.to_local()
            parameter.grad = None
        local_gradients = [master.grad for _, master in self.shards if master.grad is not None]
        local_norm = global_norm(local_gradients).to(self.world.device)  # without gradients it is on the CPU
        norm = self.vectors.average_gradients(local_norm.square())
        self.masters.step(learning_rate, norm)
        return norm

    def differentiate(self, batch) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        self.module.set_requires_gradient_sync(False)
        self.module.set_reshard_after_forward(False)  # the gathered parameters stay until the next backward pass ends
        self.module.set_reshard_after_backward(False)
        loss = self.module(batch)
        self.module.set_reshard_after_forward(self.config.reshard_after_forward)
        return differentiated(loss, self.module.parameters())

    @torch.no_grad()
    def predict(self, batch) -> Tensor:
        self.module.eval()
        logits = self.module.predict(batch)
        self.module.train()
        self._reshard()
        return logits

    def state(self) -> Iterator[tuple[str, Piece]]:
        return self.masters.state()

    def load_state(self, read: ReadSlice, step: int) -> None:
        self.masters.load(read, step)
        self._reshard()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            full = parameter if name in self.vectors.parameters else parameter.full_tensor()
            if self.world.is_main:
                yield name, full.detach().cpu()

    def close(self) -> None:
        """Does nothing: the process group is the world's."""

    def _reshard(self) -> None:
        """Forgets the gathered parameters, since no backward pass comes to do so before they are out of date."""
        for group in self.groups:
            group.reshard()


def _shard(model: nn.Module, vectors: Vectors, config: Fsdp2Config, world: World, precision: str) -> nn.Module:
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    with unset_fake_temporarily():  # a mesh reads the values of its tensor of ranks
        mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": config.reshard_after_forward}
    groups, ignored = model.groups or model.blocks, set(vectors.parameters.values())
    for group in groups:
        fully_shard(group, ignored_params=ignored, **options)
    # The rest: embeddings, the last LayerNorm, the head. It would find the blocks again, outside their groups.
    fully_shard(model, ignored_params=ignored | set(model.blocks.parameters()), **options)
    if not config.reshard_after_forward:
        # CUDA graphs read parameters where the last gather put them.
        for module in (model, *groups):
            for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                parameter.free_unsharded_param = lambda: None
    for module, following in pairwise([model, *groups]):  # the host may be late, the gathers need not be
        module.set_modules_to_forward_prefetch([following])
    register_fsdp_forward_method(model, "predict")
    return model


def _first_index(length: int, rank: int, num_ranks: int) -> int:
    """Where a rank's slice of a DTensor begins. fully_shard cuts dimension 0 as torch.chunk does."""
    return min(rank * -(-length // num_ranks), length)


def _spans(matrices: dict[str, tuple[int, int]], rank: int, num_ranks: int) -> dict[str, Span]:
    """What a rank holds of each matrix."""
    return {
        name: (_first_index(rows, rank, num_ranks) * columns, _first_index(rows, rank + 1, num_ranks) * columns)
        for name, (rows, columns) in matrices.items()
    }
