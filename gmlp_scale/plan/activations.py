"""Counts what the blocks keep for the backward pass, by running one of them."""

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gmlp_scale.engine.float32_vectors import round_matrices
from gmlp_scale.models import ModelConfig, build_model, with_kernels
from gmlp_scale.models.recompute import Recompute


def activation_bytes_per_token(model: ModelConfig, precision: str, recompute: Recompute) -> float:
    """Bytes that all blocks keep between the forward and the backward pass, per token of a micro-batch.

    Counted in plain PyTorch for rows without padding; torch.compile and fused kernels keep less. Not counted are the
    embedding, the head, and what a function keeps beside its result: the statistics of LayerNorms and softmaxes, and
    the copies of transposed operands that Mixer and the Transformer with relative positions make.
    """
    config = with_kernels(model.model_copy(update={"num_blocks": 1}), "torch")
    one_block = build_model(config, seed=None)  # on the CPU, since the meta device imports a compiler
    one_block = round_matrices(one_block, precision)
    one_block.set_recompute(recompute)

    def kept_bytes(num_rows: int) -> int:
        shape_BND, dtype = (num_rows, model.sequence_length, model.d_model), one_block.embedding.weight.dtype
        x_BND = torch.zeros(shape_BND, dtype=dtype, requires_grad=True)
        with _Results() as results:
            output_BND = one_block.blocks[0](x_BND)  # counted in place of the input, which no function here made
        size = results.bytes_alive()
        del output_BND  # its graph kept all the others alive until here
        return size

    # The difference leaves out what all rows share, such as the matrix of a Toeplitz vector.
    return model.num_blocks * (kept_bytes(2) - kept_bytes(1)) / model.sequence_length


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
