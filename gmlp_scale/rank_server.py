"""What launch/elastic.py starts once on each host, and forks the ranks of every start from: all that is slow to import.

Nothing of it asks for a GPU, which a forked process could not use then.
"""

import gc
import importlib
import os
import signal

from gmlp_scale.process import STOP_SIGNALS

for name in (
    "gmlp_scale.run",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.run",  # by launch/elastic.py, which multiprocessing imports in each rank
    "tensorboard.plugins.custom_scalar.layout_pb2",  # by the log files
    "tensorboard.plugins.hparams.summary_v2",
):
    importlib.import_module(name)
gc.freeze()  # or every rank would walk, and so copy, all of this as it collects and as it ends
os.setsid()
# A terminal and Slurm send signals to all processes of a job. The launcher hears them, and tells the ranks.
for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
