"""Times what a training step costs the host, beside what a GPU would need for it, without a GPU.

python benchmarks/host.py --config configs/pretrain/gmlp_xlarge.yaml
python benchmarks/host.py --config configs/pretrain/gmlp_xlarge.yaml optimizer.kind=muon

It trains a recipe's blocks at a width where even a CPU computes next to nothing. What remains is Python, torch's
dispatch and the engines' hooks: as on a GPU, with a group of blocks as one graph, the fused gating and gradients' norms
taken together. fsdp2 is rank 0 of 32 ranks that do not exist; zero and single are one. With CUDA graphs every group's
results are there already, as after a replay. Left out are the launches of Triton's kernels and of graphs, torch's
checks before a replay, NCCL, streams and events: a GPU's host spends some microseconds more on each.

Figures are CPU time of one thread, the least of several rounds, as other programs only add to it. A step's is also a
number of in-place additions to a tensor of four numbers. `device`: what launch/plan.py assumes for an H100.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import get_total_norm

from benchmarks.compiled_kernels import without_kernels
from benchmarks.reports import markdown
from benchmarks.timing import recipe_of_command, say
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_fake_world, start_world
from gmlp_scale.engine import ENGINES, EngineConfig, Fsdp2Config, computing, fsdp2, single
from gmlp_scale.plan.layouts import GPUS, Assumptions
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.trial import forget_other_recipes, new_engine, random_batch

NUM_ROWS, NUM_FAKE_RANKS = 8, 32  # a global batch of 256 on four nodes of eight GPUs
SIZES = {"d_model": 8, "d_ffn": 16, "num_heads": 1, "sequence_length": 16, "vocab_size": 64, "kernels": "triton"}
"""As far as the model has these fields."""
COMPILED = {"no": False, "yes": True, "CUDA graphs": "reduce-overhead"}
TRAIN = {"micro_batch_size": 1, "precision": "bf16", "device": "cpu"}
NUM_ROUNDS = 20
NUM_ADDITIONS = 2000


@command
def main() -> int:
    run = recipe_of_command(__doc__)
    torch.set_num_threads(1)
    print(table(run))
    return 0


def table(run: RunConfig) -> str:
    """Every engine's milliseconds on one rank, for each value of train.compile, as a Markdown table."""
    sharded = {name: engine for name, engine in ENGINES.items() if isinstance(engine, Fsdp2Config)}
    others = {name: engine for name, engine in ENGINES.items() if name not in sharded}
    with ExitStack() as stack:
        stack.enter_context(without_kernels(lambda *launch: None))
        stack.enter_context(patch.object(computing, "compiled_modules", lambda model, device: model.groups))
        for module in (single, fsdp2):
            stack.enter_context(patch.object(module, "global_norm", partial(get_total_norm, foreach=True)))
        with start_world(run.engine.timeout_seconds, "cpu", init_group=True) as world:
            rows = list(rows_of(run, others, world))
        with start_fake_world(NUM_FAKE_RANKS) as world:
            rows += rows_of(run, sharded, world)
    figures = ["forward ms", "backward ms", "update ms", "a block ms", "step ms"]
    figures += [f"device ms, {NUM_ROWS} rows", "host over device", "step in additions"]
    return markdown(["engine", "compiled", *figures], rows)


def rows_of(run: RunConfig, engines: dict[str, EngineConfig], world: World) -> Iterator[list[str]]:
    assumed = Assumptions(GPUS["h100"], num_gpus=1, num_nodes=1)
    device = 1e3 * NUM_ROWS * run.flops_per_row().last / assumed.flops_per_second("bf16")
    sizes = {name: size for name, size in SIZES.items() if name in type(run.model).model_fields}
    tiny = run.model_copy(update={"model": run.model.model_copy(update=sizes)})
    for (name, engine), (compiled, compile) in itertools.product(engines.items(), COMPILED.items()):
        if any(engine.mistakes(tiny.with_train(compile=compile).train)):
            continue
        say(f"{name}, train.compile={compile}")
        forget_other_recipes(world.device)
        tried = tiny.with_train(**TRAIN, compile=bool(compile)).model_copy(update={"engine": engine})
        with replays() if compiled == "CUDA graphs" else nullcontext():
            addition, forward, backward, update = (1e3 * seconds for seconds in least_seconds(tried, world))
        micro_batch = forward + backward
        step = micro_batch + update
        figures = forward, backward, update, micro_batch / run.model.num_blocks, step, device, step / device
        yield [name, compiled, *(f"{figure:.3g}" for figure in (*figures, step / addition))]


@contextmanager
def replays() -> Iterator[None]:
    """Compiled modules compute once; then they return tensors in the same memory, as a replayed CUDA graph does."""
    compile, backend = nn.Module.compile, aot_autograd(fw_compiler=_computed_once)
    with patch.object(nn.Module, "compile", lambda module, **_: compile(module, backend=backend)):
        yield


def _computed_once(graph: nn.Module, _: list[torch.Tensor]) -> Callable[[list], tuple]:
    results = []

    def run(arguments: list) -> tuple:
        if not results:
            results.extend(graph(*arguments))
        arguments.clear()
        return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in results)

    run._boxed_call = True  # it takes one list, and empties it
    return run


def least_seconds(run: RunConfig, world: World) -> list[float]:
    """Of an addition, and of a micro-batch's forward pass, its backward pass and an update."""
    engine, batch = new_engine(run, world), random_batch(run, world.device)
    small, rounds = torch.zeros(4), []
    for _ in range(NUM_ROUNDS + 1):
        losses = []
        addition = cpu_seconds(lambda: [small.add_(1) for _ in range(NUM_ADDITIONS)]) / NUM_ADDITIONS
        forward = cpu_seconds(lambda losses=losses: losses.append(engine.module(batch)))
        backward = cpu_seconds(lambda losses=losses: engine.backward(losses.pop(), is_last=True))
        update = cpu_seconds(lambda: engine.step(run.optimizer.peak_learning_rate))
        rounds.append((addition, forward, backward, update))
    engine.close()
    return [min(seconds) for seconds in zip(*rounds[1:], strict=True)]


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
