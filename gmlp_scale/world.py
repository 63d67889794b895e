"""The processes of a run: who this one is, its device, the process groups, stop signals and logging.

Nothing else in the package reads the environment.
"""

import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what Slurm sends some time before it ends a job (--signal=USR1@120)."""


_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h, in bytes: free memory that is kept, and the size from which a tensor is given back at once."""


class OtherRankError(RuntimeError):
    """This rank is well but another one is not; the other one's message says why."""


class DeviceError(RuntimeError):
    """The device that was asked for is not there."""


def launched_world_size() -> int:
    """The number of processes that the launcher started (torchrun and deepspeed both set WORLD_SIZE); 1 without one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start_world(
    timeout_seconds: float,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    init_group: bool = False,
    hear_stop_signals: bool = True,
) -> "World":
    """Joins the processes that the launcher started.

    Args:
        timeout_seconds: how long a collective waits for the other ranks before it raises.
        device: "auto" takes the GPU of this process's local rank where there is one.
        init_group: initialise the process group for a single process too; ZeRO and FSDP2 need it.
        hear_stop_signals: turn them into the answer of `stop_requested`; for those who ask it.

    Raises:
        ValueError: the launcher's variables are incomplete.
        DeviceError: "cuda" was asked for and there is none, or fewer GPUs than local ranks.
    """
    size, rank = launched_world_size(), int(os.environ.get("RANK", 0))
    if size > 1 and not {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            f"WORLD_SIZE is {size}, but RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not all set: "
            "start the processes with torchrun or deepspeed, or set all five"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("train.device is cuda, but torch finds no CUDA device here: set train.device to auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # DeepSpeed reads these two: it would find the GPU where the run was asked to stay on the CPU, and it insists on a
    # local rank even where no launcher gave one.
    os.environ["DS_ACCELERATOR"] = device
    os.environ["LOCAL_RANK"] = str(local_rank)
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise DeviceError(
                f"local rank {local_rank} has no GPU of its own: torch finds {torch.cuda.device_count()} here; start "
                "as many processes on a node as it has GPUs, or set train.device to cpu"
            )
        torch.cuda.set_device(local_rank)
    torch_device = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cpu":
        _keep_freed_memory()

    store = host_group = None
    if size > 1 or init_group:
        timeout = timedelta(seconds=timeout_seconds)
        store = next(dist.rendezvous("env://", timeout=timeout))[0] if size > 1 else dist.HashStore()
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=timeout)
    if size > 1:
        # Of its own, so that what the host agrees on cannot meet an engine's collectives in another order.
        host_group = dist.new_group(backend="gloo", timeout=timeout)
    stop_signal = _StopSignal(store, STOP_SIGNALS if hear_stop_signals else ())
    return World(rank, size, local_rank, torch_device, host_group, stop_signal)


def _keep_freed_memory() -> None:
    """Has the C library keep what tensors free, and the kernel back large tensors with huge pages.

    A step allocates and frees gigabytes. By default glibc returns every tensor of more than 32 MiB to the kernel, which
    clears each 4 KiB page of it anew: a tenth of a step of gMLP base's blocks. Other C libraries are left alone. Huge
    pages are had only if no tensor was allocated before.
    """
    if _HUGE_PAGES not in os.environ:
        os.environ[_HUGE_PAGES] = "1"
        torch.empty(1)  # when torch asks; child processes are not to
        del os.environ[_HUGE_PAGES]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # Before glibc 2.35 at most 32 MiB are taken; with neither, the other option would give back all above 128 KiB.
    if mallopt and (mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25)):
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True, eq=False)
class World:
    """One process among `size`. A context manager: leaving it ends the process groups."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    _host_group: dist.ProcessGroup | None
    _stop_signal: "_StopSignal"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self._host_group:
            dist.barrier(self._host_group)

    def sum(self, values: list[float]) -> list[float]:
        """Element by element over all ranks, in float64 on the host; every rank gets the sums."""
        total = torch.tensor(values, dtype=torch.float64)
        if self._host_group:
            dist.all_reduce(total, group=self._host_group)
        return total.tolist()

    def gather(self, value: int) -> list[int]:
        """Every rank's value, by rank, on every rank."""
        values = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        if self._host_group is None:
            return [value]
        dist.all_gather(values, torch.tensor([value]), group=self._host_group)
        return [v.item() for v in values]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, small and JSON-able, on every rank."""
        if self._host_group is None:
            return value
        text = json.dumps(value).encode() if self.is_main else b""
        size = torch.tensor([len(text)])
        dist.broadcast(size, src=0, group=self._host_group)
        content = torch.tensor(list(text), dtype=torch.uint8) if self.is_main else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(content, src=0, group=self._host_group)
        return json.loads(bytes(content.tolist()))

    def on_main(self, action: Callable[[], object]) -> None:
        """Runs `action` on rank 0 while the others wait for it.

        Raises:
            Whatever `action` raises, on rank 0; OtherRankError on the other ranks, so that none goes on alone.
        """
        error = None
        if self.is_main:
            try:
                action()
            except Exception as raised:
                error = raised
        failed = self.gather(int(error is not None))[0]
        if error:
            raise error
        if failed:
            raise OtherRankError("rank 0 could not go on; its own message says why")

    def wait_for_device(self) -> None:
        """Until the device has done all that it was given: for a clock, never in an ordinary step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def stop_requested(self) -> bool:
        """Whether the run is to end after this step: the same answer on every rank at the same call.

        To be called by all ranks after each step. A signal to any rank is answered at the call after the one that
        notices it; the ranks must meet in between, as they do over the next step's gradients.
        """
        return self._stop_signal.next_answer()

    def stop(self) -> None:
        """Ends the process groups once all ranks are here. Engines must be closed before.

        Without it a gloo thread may come back to an interpreter that has gone and abort the process ("terminate called
        without an active exception"); this waits for those threads.
        """
        self._stop_signal.restore()
        self.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        if exception_type is None:
            self.stop()
        else:
            self._stop_signal.restore()  # the other ranks may never come: leave without them


class _StopSignal:
    """Turns a signal to any rank into one answer for all, through the launcher's key-value store.

    Not through an overlapped all_reduce: a process cannot end while one of its collectives is pending, so a rank that
    failed would stay until the timeout, unnoticed by the launcher and by the other ranks.
    """

    def __init__(self, store: dist.Store | None, numbers: Iterable[signal.Signals]):
        self.store = store
        self.is_signalled = False
        self.num_calls = 0
        self.previous = {number: signal.signal(number, self._on_signal) for number in numbers}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_signalled and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked a second time: do not wait for the end of the step
        self.is_signalled = True

    def next_answer(self) -> bool:
        self.num_calls += 1
        if self.store is None:
            return self.is_signalled
        if self.is_signalled:
            # The first to ask decides. No rank can pass its next call before this one takes part in the next step, by
            # when the store has confirmed this.
            stop_call = self.store.compare_set("stop_call", "", str(self.num_calls + 1))
        elif self.store.check(["stop_call"]):
            stop_call = self.store.get("stop_call")
        else:
            return False
        return self.num_calls >= int(stop_call)

    def restore(self) -> None:
        for number, previous in self.previous.items():
            signal.signal(number, previous)


def set_up_logging(world: World) -> None:
    """Sends the package's log to standard error: all of rank 0's, the others' warnings, each line with its rank."""
    rank = f" rank {world.rank}" if world.size > 1 else ""
    line = logging.StreamHandler(sys.stderr)
    line.setFormatter(logging.Formatter(f"%(asctime)s{rank} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    log = logging.getLogger("gmlp_scale")
    log.handlers = [line]
    log.propagate = False
    log.setLevel(logging.INFO if world.is_main else logging.WARNING)
