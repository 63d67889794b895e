"""This process alone: its device, memory, open files and stop signals."""

import atexit
import contextlib
import ctypes
import logging
import os
import resource
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Literal

import torch

from gmlp_scale.errors import UserError

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Slurm sends SIGUSR1 some time before it ends a job (--signal=USR1@120); a terminal that closes sends SIGHUP."""

_SOCKETS_PER_RANK = 4
"""What gloo, NCCL and the store open for each other rank, at most; the least that was measured is 2."""
_OTHER_OPEN_FILES = 256
"""Shards, checkpoints, logs and libraries."""

ONE_GPU_EACH = "start as many processes on a node as it has GPUs, or set train.device to cpu"

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of glibc's malloc.h, in bytes: how much free memory to keep, and the size from which a freed block goes back
to the kernel at once."""


class DeviceError(UserError):
    """The machine lacks the device that the recipe asks for."""

    exit_code = 2


def allow_open_files(rank: int, size: int) -> None:
    """Raises the soft limit on open files, often 1024, to the hard one; a world of 256 ranks needs more."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:  # macOS, which refuses it as a soft limit
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    needed = _SOCKETS_PER_RANK * size + _OTHER_OPEN_FILES
    if rank == 0 and limit < needed:
        log.warning(
            "a process may open %d files here, and %d ranks may need %d: raise ulimit -Hn on every node, "
            "in limits.conf, as the service's LimitNOFILE or with docker run --ulimit nofile=65536",
            limit, size, needed,
        )  # fmt: skip


def take_device(kind: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device that this process computes on: the GPU of its local rank or the only one that it sees, or the CPU.

    Raises:
        DeviceError: `kind` is "cuda" without a GPU, or there are fewer GPUs than local ranks.
    """
    has_gpu = torch.cuda.is_available()
    if kind == "cuda" and not has_gpu:
        raise DeviceError("train.device is cuda, but torch finds no CUDA device here: set train.device to auto or cpu")
    device = _own_gpu(local_rank) if has_gpu and kind != "cpu" else torch.device("cpu")
    # DeepSpeed reads these two. Without the first it would take a GPU for a run on the CPU. The second is the number of
    # its GPU; it needs it even without a launcher.
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(local_rank if device.index is None else device.index)
    return device


def _own_gpu(local_rank: int) -> torch.device:
    num_gpus = torch.cuda.device_count()
    # A launcher may let each process see its own GPU only, as Slurm does with --gpus-per-task=1.
    index = local_rank if num_gpus > 1 else 0
    if index >= num_gpus:
        raise DeviceError(f"local rank {local_rank} has no GPU of its own: torch finds {num_gpus}; {ONE_GPU_EACH}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def keep_freed_memory() -> None:
    """Makes glibc keep the memory of freed tensors, and the kernel give large tensors huge pages.

    A step allocates and frees gigabytes. By default glibc returns large tensors to the kernel, which clears their pages
    anew each time (docs/LOG.md has the cost). Other C libraries are left alone. Huge pages need that no tensor was
    allocated before.
    """
    if _HUGE_PAGES not in os.environ:
        os.environ[_HUGE_PAGES] = "1"
        torch.empty(1)  # torch reads the variable now; child processes must not
        del os.environ[_HUGE_PAGES]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Before glibc 2.35 this option is at most 32 MiB. If it fails, leave the other one alone: setting that would fix
    # this one at 128 KiB.
    if mallopt and (mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class StopSignal:
    """Remembers that one of the signals `numbers` came. Rank 0 prints the first one.

    An ignored signal stays ignored, such as SIGHUP under nohup. A process that was asked to stop goes on hearing the
    signals until its interpreter ends, so that none of them kills it after all was saved.
    """

    def __init__(self, numbers: Iterable[signal.Signals], *, rank: int):
        self.is_signalled = False
        self._is_main = rank == 0
        heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self._on_signal) for number in heard}
        if heard:
            atexit.unregister(ignore_stop_signals)
            atexit.register(ignore_stop_signals)  # anew, since what was registered last comes first

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_signalled and number == signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)  # a third one would cut off what this one ends
            raise KeyboardInterrupt  # the second Ctrl-C: do not wait for the end of the step
        if not self.is_signalled and self._is_main:
            name = signal.Signals(number).name
            line = f"{name}: stopping after this step; Ctrl-C (SIGINT) now leaves without waiting for it\n"
            with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
                os.write(2, line.encode())  # not the log, whose lock the interrupted code may hold
        self.is_signalled = True

    def restore(self) -> None:
        """Gives the signals to whoever had them before, unless one of them came."""
        for number, previous in self.previous.items() if not self.is_signalled else ():
            signal.signal(number, previous)


def ignore_stop_signals() -> None:
    """For a process that is about to end. The interpreter's own end would give them their default action again."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
