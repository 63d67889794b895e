"""Counts the bytes of all live tensors: tensors on a CPU, or fake ones."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak` is the most bytes that were alive after an operation, since `peak` was last set to 0.

    It sees the storages that operations take and return, whichever thread frees them and however they are resized. It
    does not see memory that an operation uses inside.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        is_new = False
        for tensor in tree_leaves((arguments, keywords, result)):
            # A DTensor's storage is a stand-in for its local tensor's.
            if isinstance(tensor, Tensor) and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                is_new |= reference.cdata not in self._storages
                self._storages[reference.cdata] = reference
        if is_new:  # other operations can only free
            self.peak = max(self.peak, self._count())
        return result

    def _count(self) -> int:
        """Bytes of the live storages. Those that are gone are forgotten."""
        total = 0
        for address in list(self._storages):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total
