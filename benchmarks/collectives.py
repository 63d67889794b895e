"""Counts the bytes that each engine's collectives carry in one training step, and its peak memory.

A ring of R ranks sends (R - 1) / R of the bytes of a gather or a reduction to owners, and 2 (R - 1) / R of an
all-reduce's. So with many ranks an all-reduce counts twice on the wire.
"""

from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.comparison import markdown
from benchmarks.live_bytes import LiveBytes
from benchmarks.step import our_engine, random_batch
from gmlp_scale.distributed.world import World, start_fake_world
from gmlp_scale.engine import COLLECTIVES, EngineConfig, Fsdp2Config
from gmlp_scale.plan import layouts
from gmlp_scale.plan.describe import count_parameters, short
from gmlp_scale.recipe.config import RunConfig

ENGINES = {name: engine for name, engine in layouts.ENGINES.items() if engine.needs_process_group}


class CarriedBytes(TorchDispatchMode):
    """Adds up the bytes of whole tensors by kind of collective, on any backend."""

    def __init__(self):
        super().__init__()
        self.by_kind = Counter()
        self.num_calls = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "c10d" and (kind := _kind(str(function.overloadpacket))):
            # The larger of what goes in and what comes out is the whole tensor.
            self.num_calls[kind] += 1
            self.by_kind[kind] += max(_num_bytes(values) for values in arguments[:2])
        return function(*arguments, **(keywords or {}))


def count_step(run: RunConfig, engine: EngineConfig, world: World, num_micro_batches: int) -> tuple[CarriedBytes, int]:
    """What one step of several micro-batches carries, and this rank's peak memory in a step.

    All ranks call it together.
    """
    batch = random_batch(run, world.device)
    with LiveBytes() as live:
        built = our_engine(run.model_copy(update={"engine": engine}), world, num_micro_batches)
        live.peak = 0
        for _ in range(2):  # the first step also sets things up
            with CarriedBytes() as carried:
                for index in range(num_micro_batches):
                    built.backward(built.module(batch) / num_micro_batches, is_last=index == num_micro_batches - 1)
                built.step(run.optimizer.peak_learning_rate)
    built.close()
    return carried, live.peak


def bytes_per_parameter(run: RunConfig, engine: EngineConfig, world: World, num_micro_batches: int) -> dict[str, float]:
    """What a step carries by each kind of collective and on the wire, and this rank's peak memory.

    All ranks call it together.
    """
    carried, peak = count_step(run, engine, world, num_micro_batches)
    counted = {kind: carried.by_kind[kind] for kind in COLLECTIVES}
    counted |= {"wire": layouts.wire_bytes(carried.by_kind), "peak memory": peak}
    num_parameters = count_parameters(run)
    return {name: num_bytes / num_parameters for name, num_bytes in counted.items()}


def table(run: RunConfig, world: World) -> str:
    """Every engine's bytes per parameter and step, with one and with four micro-batches, in Markdown."""
    figures = ["all-reduce", "reduce to owners", "gather", "all-to-all", "on the wire", "peak memory"]
    rows = []
    for name, engine in ENGINES.items():
        for num_micro_batches in (1, 4):
            counted = bytes_per_parameter(run, engine, world, num_micro_batches)
            rows.append([name, str(num_micro_batches), *(f"{value:.1f}" for value in counted.values())])
    return markdown(["engine", "micro-batches", *figures], rows)


def count_fake_step(run: RunConfig, num_ranks: int) -> tuple[CarriedBytes, int]:
    """`count_step` of one micro-batch under FSDP2, as rank 0 of ranks that do not exist. Nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    engine = run.engine if isinstance(run.engine, Fsdp2Config) else Fsdp2Config()
    with start_fake_world(num_ranks) as world, FakeTensorMode():
        return count_step(run, engine, world, num_micro_batches=1)


def describe_fake_step(run: RunConfig, num_ranks: int) -> str:
    """`count_fake_step` in words, uncompiled and with the recipe's micro-batch, or one row if it is `auto`."""
    rows = 1 if run.train.micro_batch_size == "auto" else run.train.micro_batch_size
    train = run.train.model_copy(update={"micro_batch_size": rows, "compile": False})
    carried, peak = count_fake_step(run.model_copy(update={"train": train}), num_ranks)
    sizes = ", ".join(f"{carried.num_calls[kind]} {kind} of {short(carried.by_kind[kind])}B" for kind in COLLECTIVES)
    return (
        f"fsdp2 built for {num_ranks} ranks on fake tensors, one micro-batch of {rows} rows in plain PyTorch: peak "
        f"{short(peak)}B per rank with activations; collectives of a step, with their bytes together: {sizes}"
    )


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
