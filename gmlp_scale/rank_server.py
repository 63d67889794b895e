"""What launch/elastic.py starts once on each host, and forks the ranks of every start from: all that is slow to import.

Nothing of it asks for a GPU, which a forked process could not use then.
"""

import gc
import importlib
import os

for name in (
    "gmlp_scale.run",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.run",  # by launch/elastic.py, which multiprocessing imports in each rank
    "tensorboard.compat.proto.event_pb2",
):
    importlib.import_module(name)
gc.freeze()  # or every rank would walk, and so copy, all of this as it collects and as it ends
os.setsid()  # a terminal and Slurm send signals to all processes of a session: the launcher passes them on to the ranks
