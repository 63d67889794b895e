"""Starts an engine again and again on two gloo processes, one step each, and fails unless every process ends with 0.

python tests/engine/start_and_end.py NUM_STARTS ENGINE [ENGINE ...]

The libraries are imported once and every rank is forked from there, but it ends as any process does, through the
interpreter's own clean-up, which is where gloo's threads would abort it.
"""

import gc
import importlib
import itertools
import os
import sys

import torch

from gmlp_scale.distributed.world import start_world
from tests.engine.trained_engines import ENGINES, GMLP, start_engine, train
from tests.gloo_ranks import rank_variables


def main(num_starts: int, engine_names: list[str]) -> int:
    torch.set_num_threads(1)  # and no thread before the forks
    # What torch and DeepSpeed import at the first optimizer, 1 to 4 seconds of it; less in each process ends faster.
    importlib.import_module("torch._dynamo")
    for engine_name, number in itertools.product(engine_names, range(num_starts)):
        if number == 0 and engine_name.startswith("zero"):
            os.environ["DS_ACCELERATOR"] = "cpu"
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        if number == 0:
            gc.freeze()  # or every child would walk, and so copy, all of the imports as it ends
        children = []
        for variables in rank_variables(1 if engine_name == "single" else 2):
            child = os.fork()
            if child == 0:
                os.environ.update(variables)
                return _one_step(ENGINES[engine_name])
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            print(f"start {number} of {engine_name} ended with {codes}")
            return 1
    return 0


def _one_step(engine_config) -> int:
    with start_world(60, "cpu") as world:
        engine = start_engine(world, GMLP, engine_config)
        train(engine, world, 0, 1)
        world.sum_on_device(torch.zeros(1))
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
