"""Training steps of a recipe on random tokens, without shards and without a run folder: what they take and carry.

A ring of R ranks sends (R - 1) / R of the bytes of a gather or a reduction to owners, and 2 (R - 1) / R of an
all-reduce's. So with many ranks an all-reduce counts twice on the wire.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS, MaskedBatch, num_masked_positions
from gmlp_scale.distributed.world import World, start_fake_world
from gmlp_scale.engine import Engine, EngineConfig, Fsdp2Config
from gmlp_scale.plan.describe import short
from gmlp_scale.plan.rank_bytes import COLLECTIVES
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.run import build_engine_of


def random_batch(run: RunConfig, device: torch.device) -> MaskedBatch:
    """One micro-batch; always the same one."""
    rows, length = run.train.micro_batch_size, run.model.sequence_length
    num_masked = num_masked_positions(length, run.data.masked_fractions.last)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(NUM_SPECIAL_TOKENS, run.model.vocab_size, (rows, length), generator=generator)
    positions = torch.rand(rows, length, generator=generator).argsort(1)[:, :num_masked].sort(1).values
    return MaskedBatch(ids, positions, ids.gather(1, positions), padded=run.data.padded).to(device)


def new_engine(
    run: RunConfig, world: World, num_micro_batches: int = 1, weights: Mapping[str, Tensor] | None = None
) -> Engine:
    """The recipe's engine.

    num_micro_batches: of a step, on each rank.
    weights: by parameter name; drawn anew if None.
    """
    num_rows = num_micro_batches * world.size * run.train.micro_batch_size
    task = Pretraining(run.with_train(global_batch_size=num_rows).model_copy(update={"init_from": None}))
    if weights:
        task.initialise = partial(torch.nn.Module.load_state_dict, state_dict=weights, strict=False)
    return build_engine_of(task, world, is_new=True)


def train_step(engine: Engine, run: RunConfig, *micro_batches: MaskedBatch) -> None:
    """Forward, backward and update."""
    for index, batch in enumerate(micro_batches, start=1):
        engine.backward(engine.module(batch) / len(micro_batches), is_last=index == len(micro_batches))
    engine.step(run.optimizer.peak_learning_rate)


def forget_other_recipes(device: torch.device) -> None:
    """Frees the memory of recipes that came before, and the code that torch compiled for them: torch would generalise
    that code instead of compiling this recipe's anew."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(call: Callable[[], object], device: torch.device, num_calls: int = 1) -> float:
    """Seconds per call; the device is idle before the first and after the last."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    wait_for(device)
    return (time.perf_counter() - started) / num_calls


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class ByteCounts(TorchDispatchMode):
    """Counts the bytes of live tensors, on a CPU or fake, and the bytes of whole tensors that collectives carry.

    It sees the storages that operations take and return, whichever thread frees them and however they are resized. It
    does not see memory that an operation uses inside.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        """The most bytes that were alive after an operation, since `peak` was last set to 0."""
        self.carried: Counter[str] = Counter()
        """Bytes by kind of collective."""
        self.num_calls: Counter[str] = Counter()
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "c10d" and (kind := _kind(str(function.overloadpacket))):
            # The larger of what goes in and what comes out is the whole tensor.
            self.num_calls[kind] += 1
            self.carried[kind] += max(_num_bytes(values) for values in arguments[:2])
        result = function(*arguments, **(keywords or {}))
        is_new = False
        for tensor in tree_leaves((arguments, keywords, result)):
            # A DTensor's storage is a stand-in for its local tensor's.
            if isinstance(tensor, Tensor) and not tensor.is_meta and not is_traceable_wrapper_subclass(tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                is_new |= reference.cdata not in self._storages
                self._storages[reference.cdata] = reference
        if is_new:  # other operations can only free
            self.peak = max(self.peak, self._live_bytes())
        return result

    def _live_bytes(self) -> int:
        """Forgets the storages that are gone."""
        total = 0
        for address in list(self._storages):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is None:
                del self._storages[address]
            else:
                total += storage.nbytes()
        return total


def _kind(collective: str) -> str | None:
    if "alltoall" in collective:
        return "all_to_all"
    if "allreduce" in collective:
        return "all_reduce"
    if "reduce" in collective:
        return "reduce"
    return "gather" if "gather" in collective or "broadcast" in collective else None


def _num_bytes(values) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(values) if isinstance(tensor, Tensor))


def count_step(run: RunConfig, engine: EngineConfig, world: World, num_micro_batches: int) -> ByteCounts:
    """What one step of several micro-batches carries, and this rank's peak memory in a step.

    All ranks call it together.
    """
    batch = random_batch(run, world.device)
    with ByteCounts() as counts:
        built = new_engine(run.model_copy(update={"engine": engine}), world, num_micro_batches)
        counts.peak = 0
        for _ in range(2):  # the first step also sets things up
            counts.carried.clear()
            counts.num_calls.clear()
            train_step(built, run, *[batch] * num_micro_batches)
    built.close()
    return counts


def count_fake_step(run: RunConfig, num_ranks: int) -> ByteCounts:
    """`count_step` of one micro-batch under FSDP2, as rank 0 of ranks that do not exist. Nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    engine = run.engine if isinstance(run.engine, Fsdp2Config) else Fsdp2Config()
    with start_fake_world(num_ranks) as world, FakeTensorMode():
        return count_step(run, engine, world, num_micro_batches=1)


def describe_fake_step(run: RunConfig, num_ranks: int) -> str:
    """`count_fake_step` in words, uncompiled and with the recipe's micro-batch, or one row if it is `auto`."""
    rows = 1 if run.train.micro_batch_size == "auto" else run.train.micro_batch_size
    counts = count_fake_step(run.with_train(micro_batch_size=rows, compile=False), num_ranks)
    sizes = ", ".join(f"{counts.num_calls[kind]} {kind} of {short(counts.carried[kind])}B" for kind in COLLECTIVES)
    return (
        f"fsdp2 built for {num_ranks} ranks on fake tensors, one micro-batch of {rows} rows in plain PyTorch: peak "
        f"{short(counts.peak)}B per rank with activations; collectives of a step, with their bytes together: {sizes}"
    )
