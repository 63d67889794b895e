"""Imports all that is slow to import. launch/elastic.py starts it once on each host, and forks the ranks from it.

Nothing here asks for a GPU, since a forked process could not use it then.
"""
# ruff: noqa: F401

import gc
import os
import signal

import tensorboard.plugins.custom_scalar.layout_pb2
import tensorboard.plugins.hparams.summary_v2
import torch._dynamo  # by the first optimizer
import torch.distributed.fsdp
import torch.distributed.run  # by launch/elastic.py, which multiprocessing imports in each rank

import gmlp_scale.train.run
from gmlp_scale.distributed.process import STOP_SIGNALS

gc.freeze()  # or every rank would walk, and so copy, all of this as it collects and as it ends
os.setsid()
# A terminal and Slurm send signals to all processes of a job. The launcher hears them, and sends them on to the ranks.
for number in STOP_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
