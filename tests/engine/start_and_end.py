"""Starts an engine again and again on two gloo processes, one step each, and fails unless every process ends with 0.

python tests/engine/start_and_end.py ENGINE NUM_STARTS

The libraries are imported once and every rank is forked from there, but it ends as any process does, through the
interpreter's own clean-up, which is where gloo's threads would abort it.
"""

import gc
import importlib
import os
import sys

import torch

from gmlp_scale.world import start_world
from tests.engine.trained_engines import ENGINES, GMLP, start_engine, train
from tests.gloo_ranks import free_port


def main(engine_name: str, num_starts: int) -> int:
    torch.set_num_threads(1)  # and no thread before the forks
    # What torch and DeepSpeed import at the first optimizer, 1 to 4 seconds of it.
    importlib.import_module("torch._dynamo")
    if engine_name.startswith("zero"):
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    gc.freeze()  # or every child would walk, and so copy, all of the imports as it ends
    world_size = 1 if engine_name == "single" else 2
    for number in range(num_starts):
        os.environ.update(WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
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
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
