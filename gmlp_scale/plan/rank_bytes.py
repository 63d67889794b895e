"""What a rank holds in memory and sends in a step: its engine's bytes by formulas, a block's activations by running it.

tests/benchmarks/test_collectives.py compares the formulas with what is counted on gloo ranks.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import assert_never

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gmlp_scale.engine import EngineConfig, Fsdp2Config, OptimizerConfig, SingleConfig, ZeroConfig
from gmlp_scale.engine.float32_vectors import float32_vectors, round_matrices
from gmlp_scale.engine.muon import BATCH_ELEMENTS, muon_matrices, owners
from gmlp_scale.engine.zero_settings import REDUCE_BUCKET_ELEMENTS
from gmlp_scale.models import ModelConfig, build_model, with_kernels
from gmlp_scale.models.attention import SelfAttention
from gmlp_scale.models.layers import Recompute

COLLECTIVES = {"all_reduce": 2, "reduce": 1, "gather": 1, "all_to_all": 1}
"""How often a collective's bytes go over the wire. `reduce` is a reduction to owners. The whole tensor of an all-to-all
is what one rank sends, its own part included."""


def state_bytes(
    engine: EngineConfig,
    model: nn.Module,
    optimizer: OptimizerConfig,
    precision: str,
    world_size: int,
    *,
    accumulates: bool,
) -> dict[str, float]:
    """Bytes by part on the rank that holds the most, at a step's peak, without activations.

    accumulates: whether a step has several micro-batches.
    """
    num_in_vectors, num_others = count_vectors_and_others(model, precision)
    weight_bytes = 2 if precision == "bf16" else 4
    match engine:
        case SingleConfig():
            parameters, gradients, buffers = num_others * weight_bytes, num_others * 4, 0
        case ZeroConfig():
            parameters, gradients, buffers = _zero_bytes(engine.stage, num_others, weight_bytes, world_size)
        case Fsdp2Config():
            parameters, gradients, buffers = _fsdp2_bytes(
                engine, model, precision, weight_bytes, world_size, accumulates
            )
        case _:
            assert_never(engine)
    # In float32 the parameters are the masters, but FSDP2 gathers parameters beside its masters.
    has_masters = precision == "bf16" or isinstance(engine, Fsdp2Config)
    num_in_matrices = count_in_matrices(model, optimizer)
    moments = (num_others * 8 - num_in_matrices * 4) / world_size
    if num_in_matrices:
        # At Muon's update a rank has its own gradients, and of a batch the gradient in float32, the update, and two
        # copies and a product of the iterations.
        of_batch = min(BATCH_ELEMENTS, num_in_matrices / world_size) * (4 + 4 * weight_bytes)
        buffers = max(buffers, num_others * 4 / world_size + of_batch - gradients)
    return {
        "parameters": num_in_vectors * 4 + parameters,
        "gradients": num_in_vectors * 4 + gradients,
        "float32 master": num_others * 4 / world_size if has_masters else 0,
        "moments": num_in_vectors * 8 + moments,
        "buffers": buffers,
    }


def _zero_bytes(stage: int, num: int, weight_bytes: int, world_size: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and buffers, for `num` parameters beside the float32 vectors.

    Stage 1 shards the masters and the moments, stage 2 the gradients too, stage 3 everything (Rajbhandari et al. 2020,
    figure 1). At a step's peak stage 3 has gathered every parameter, as DeepSpeed's stage3_max_reuse_distance is 1e9
    elements. The buffers are those of DeepSpeed 0.19.8, as counted in bf16: the copy that stage 1 all-reduces, and the
    buckets of stages 2 and 3 with their copies in float32.
    """
    parameters = num * weight_bytes * (1 + (stage == 3) / world_size)
    gradients = num * 4 / (world_size if stage >= 2 else 1)
    in_bucket = min(num, REDUCE_BUCKET_ELEMENTS)
    match stage:
        case 1:
            return parameters, gradients, num * 4
        case 2:
            return parameters, gradients, in_bucket * (weight_bytes + (weight_bytes + 4) / world_size)
        case _:
            return parameters, gradients, num * weight_bytes + in_bucket * 8


def _fsdp2_bytes(
    engine: Fsdp2Config, model: nn.Module, precision: str, weight_bytes: int, world_size: int, accumulates: bool
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and buffers, without the float32 vectors.

    Two things are not sharded: the parameters that are gathered to compute with, and the gradients while micro-batches
    accumulate. All parameters are gathered or, with `reshard_after_forward`, two groups of blocks and what is outside
    the blocks. These are freed before the group's gradients are kept, if no micro-batches accumulate, so gradients
    then count only as far as they take more than that.

    The buffers are one group's: its gradients before their reduction, what is being reduced (without accumulation, of
    the group before too), and what comes back. One rank reduces nothing.
    """
    num, num_in_blocks = (count_vectors_and_others(module, precision)[1] for module in (model, model.blocks))
    num_in_group = min(1, engine.blocks_per_group / len(model.blocks)) * num_in_blocks
    num_outside = num - num_in_blocks
    num_gathered = num_outside + min(2 * num_in_group, num_in_blocks) if engine.reshard_after_forward else num
    gradients, buffer_bytes = num * 4, weight_bytes + 4 + 4 / world_size
    if not accumulates:
        freed = num_gathered * weight_bytes if engine.reshard_after_forward else 0
        gradients = max(0, gradients / world_size - freed)
        buffer_bytes += 4
    buffers = max(num_in_group, num_outside) * (buffer_bytes if world_size > 1 else 4)
    return num_gathered * weight_bytes, gradients, buffers


def carried_bytes(
    engine: EngineConfig,
    model: nn.Module,
    optimizer: OptimizerConfig,
    precision: str,
    num_micro_batches: float,
    world_size: int,
) -> dict[str, float]:
    """Bytes of whole tensors per step in each of COLLECTIVES.

    ZeRO's stages 2 and 3 reduce after every micro-batch; stage 3 gathers for each one. In bf16 stage 1 is DeepSpeed's
    BF16_Optimizer, which all-reduces. Everything else reduces to owners.
    """
    num_reductions = num_gathers = 1
    match engine:
        case SingleConfig():
            return dict.fromkeys(COLLECTIVES, 0)
        case ZeroConfig():
            num_reductions = num_micro_batches if engine.stage > 1 else 1
            num_gathers = num_micro_batches if engine.stage == 3 else 1
        case Fsdp2Config():
            num_gathers = 2 * num_micro_batches if engine.reshard_after_forward else 1
        case _:
            assert_never(engine)
    num_in_vectors, num_others = count_vectors_and_others(model, precision)
    reduced = num_others * 4 * num_reductions
    is_all_reduced = isinstance(engine, ZeroConfig) and engine.stage == 1 and precision == "bf16"
    return {
        "all_reduce": num_in_vectors * 4 + (reduced if is_all_reduced else 0),
        "reduce": 0 if is_all_reduced else reduced,
        "gather": num_others * (2 if precision == "bf16" else 4) * num_gathers,
        "all_to_all": _exchanged_bytes(model, optimizer, precision, world_size),
    }


def wire_bytes(carried: Mapping[str, float]) -> float:
    """What collectives send if there are many ranks. `carried`: the bytes of whole tensors by kind of collective."""
    return sum(passes * carried[kind] for kind, passes in COLLECTIVES.items())


def _exchanged_bytes(model: nn.Module, optimizer: OptimizerConfig, precision: str, world_size: int) -> float:
    """What the rank that owns the most of Muon's matrices gets and sends back in a step's two all-to-alls."""
    shapes = muon_matrices(model, optimizer)
    num_owned = [0] * world_size
    for name, rank in owners(shapes, world_size).items():
        num_owned[rank] += math.prod(shapes[name])
    return 2 * max(num_owned) * (2 if precision == "bf16" else 4)


def count_in_matrices(model: nn.Module, optimizer: OptimizerConfig) -> int:
    """Elements of the parameters that Muon updates."""
    return sum(math.prod(shape) for shape in muon_matrices(model, optimizer).values())


def count_vectors_and_others(model: nn.Module, precision: str) -> tuple[int, int]:
    """Elements that stay in float32 on every rank under bf16, and all others."""
    num_in_vectors = sum(vector.numel() for vector in float32_vectors(model, precision).values())
    return num_in_vectors, sum(parameter.numel() for parameter in model.parameters()) - num_in_vectors


@cache
def activation_bytes_per_token(model: ModelConfig, precision: str, recompute: Recompute) -> float:
    """Bytes that all blocks keep between the forward and the backward pass, per token of a micro-batch.

    Counted in plain PyTorch for rows without padding; torch.compile and fused kernels keep less. Not counted are the
    embedding, the head, and what a function keeps beside its result: the statistics of LayerNorms and softmaxes, and
    the copies of transposed operands that Mixer and the Transformer with relative positions make.
    """
    # Where blocks differ, Avey's kinds take turns after the first one; the modern Transformer's keep equally much.
    period, num_counted = (2, min(model.num_blocks, 4 - model.num_blocks % 2)) if model.blocks_differ else (1, 1)
    config = with_kernels(model.model_copy(update={"num_blocks": num_counted}), "torch")
    few_blocks = build_model(config, seed=None)  # on the CPU, since the meta device imports a compiler
    few_blocks = round_matrices(few_blocks, precision)
    few_blocks.set_recompute(recompute)
    for module in few_blocks.modules():
        if isinstance(module, SelfAttention):
            module.always_fused = True

    def kept_bytes(num_rows: int) -> list[int]:
        """After 0, 1, 2 ... blocks."""
        shape_BND, dtype = (num_rows, model.sequence_length, model.d_model), few_blocks.embedding.weight.dtype
        x_BND = torch.zeros(shape_BND, dtype=dtype, requires_grad=True)
        sizes = [0]
        with _Results() as results:
            for block in few_blocks.blocks:
                x_BND = block(x_BND)  # counted in place of the input, which no function here made
                sizes.append(results.bytes_alive())
        return sizes

    # The difference leaves out what all rows share, such as the matrix of a Toeplitz vector.
    of_a_row = [two - one for one, two in zip(kept_bytes(1), kept_bytes(2), strict=True)]
    num_periods = (model.num_blocks - num_counted) // period
    return (of_a_row[-1] + num_periods * (of_a_row[-1] - of_a_row[num_counted - period])) / model.sequence_length


class _Results(TorchFunctionMode):
    """Records the storage of every tensor that a function makes, and counts those that are still in use.

    A TorchDispatchMode would see statistics too, but it imports a compiler.
    """

    def __init__(self):
        super().__init__()
        self._bytes: dict[StorageWeakRef, int] = {}

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        given = {StorageWeakRef(storage) for storage in _storages((arguments, keywords))}
        for storage in _storages(result):
            if (reference := StorageWeakRef(storage)) not in given:  # not a view of an argument
                self._bytes[reference] = storage.nbytes()
        return result

    def bytes_alive(self) -> int:
        return sum(size for storage, size in self._bytes.items() if not storage.expired())


def _storages(values) -> list[UntypedStorage]:
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
