"""Times what a training step costs the host, whatever device computes.

python benchmarks/host.py --config configs/pretrain/gmlp_xlarge.yaml
python benchmarks/host.py --config configs/pretrain/gmlp_xlarge.yaml optimizer.kind=muon

It trains a recipe's blocks, not compiled, at a width where even a CPU computes next to nothing: what remains is Python,
torch's dispatch and the engines' hooks. Figures are CPU time of one thread, also as a number of in-place additions to a
tensor of four numbers, timed in the same round. A CPU takes the norm of gradients one by one, which a GPU does not.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import torch

from benchmarks.reports import markdown
from gmlp_scale.distributed.logs import command
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.engine import ENGINES
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.trial import new_engine, random_batch

TINY = (
    "model.d_model=8", "model.d_ffn=16", "model.sequence_length=16", "model.vocab_size=64", "train.micro_batch_size=1",
    "train.precision=bf16", "train.compile=false", "train.device=cpu",
)  # fmt: skip
NUM_ROUNDS = 9
NUM_ADDITIONS = 2000


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a gMLP's recipe: its file, or its name: gmlp_base")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    run = load_run_config(options.config, [*TINY, *options.overrides])
    torch.set_num_threads(1)
    with start_world(run.engine.timeout_seconds, "cpu", init_group=True) as world:
        print(table(run, world))
    return 0


def table(run: RunConfig, world: World) -> str:
    """Every engine's median CPU time on one rank, as a Markdown table."""
    rows, small = [], torch.zeros(4)
    batch = random_batch(run, world.device)
    for name, engine_config in ENGINES.items():
        engine, rounds = new_engine(run.model_copy(update={"engine": engine_config}), world), []
        for _ in range(NUM_ROUNDS + 1):
            addition = cpu_seconds(lambda: [small.add_(1) for _ in range(NUM_ADDITIONS)]) / NUM_ADDITIONS
            micro_batch = cpu_seconds(lambda engine=engine: engine.backward(engine.module(batch), is_last=True))
            update = cpu_seconds(lambda engine=engine: engine.step(run.optimizer.peak_learning_rate))
            rounds.append((1e3 * micro_batch, 1e3 * update, micro_batch / addition, update / addition))
        engine.close()
        rows.append([name, *(f"{statistics.median(values):.4g}" for values in zip(*rounds[1:], strict=True))])
    figures = ["micro-batch ms", "update ms", "micro-batch in additions", "update in additions"]
    return markdown(["engine", *figures], rows)


def cpu_seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
