"""The processes of a run: the ranks, the store and the process groups that join them.

Only this module, rendezvous, process and logs read the environment.
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gmlp_scale.distributed.process import (
    ONE_GPU_EACH,
    STOP_SIGNALS,
    DeviceError,
    StopSignal,
    allow_open_files,
    keep_freed_memory,
    take_device,
)
from gmlp_scale.distributed.rendezvous import (
    describe_absent,
    first_line,
    hosts_of,
    join_store,
    launched,
    name_interface,
)
from gmlp_scale.distributed.roll_call import RollCall, shortened
from gmlp_scale.errors import InputError, LostRankError, OtherRankError

log = logging.getLogger(__name__)

T = TypeVar("T")


class StopSignalled(Exception):
    """A stop signal ended what can be done again after a resume, such as an evaluation."""


_NCCL_TRACE = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""torch's variable: the path of the flight recorder's dump, to which it adds the rank."""


def start_world(
    timeout_seconds: float,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    init_group: bool = False,
    hear_stop_signals: bool = True,
    run: str = "",
    traces_in: Path | None = None,
) -> "World":
    """Joins the processes that the launcher started.

    Args:
        timeout_seconds: how long a collective waits for the other ranks before it raises.
        device: "auto" takes the GPU of this process's local rank where there is one, or the only GPU that it sees.
        init_group: initialise the process group for a single process too; ZeRO and FSDP2 need it.
        hear_stop_signals: catch stop signals for `is_stop_signalled`. False for a command that never asks it.
        run: a name for what the processes do together, such as their run folder. A process of another run is refused.
        traces_in: a folder for what NCCL's flight recorder dumps when a collective times out.

    Raises:
        InputError: the launcher's variables cannot be used, their port is another job's, their ranks belong to
            another run, or this host has no network address.
        LostRankError: rank 0 was not there within the timeout.
        DeviceError: `device` is "cuda" without a GPU, or there are fewer GPUs than local ranks.
    """
    place = launched()
    rank, size, local_rank = place.rank, place.size, place.local_rank
    allow_open_files(rank, size)
    own_device = take_device(device, local_rank)
    if traces_in:
        os.environ.setdefault(_NCCL_TRACE, f"{traces_in}/nccl_trace_rank_")
    if own_device.type == "cpu":
        keep_freed_memory()

    host_group = roll_call = None
    timeout = timedelta(seconds=timeout_seconds)
    store = join_store(place, timeout, run) if size > 1 else dist.HashStore()
    try:
        if size > 1:
            name_interface(store, place)
        if size > 1 or init_group:
            backend = "cpu:gloo,cuda:nccl" if own_device.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=timeout)
        if size > 1:
            # A group of its own, so that its collectives cannot be mixed up with an engine's in another order.
            host_group = dist.new_group(backend="gloo", timeout=timeout)
            roll_call = RollCall(store, rank, hosts_of(store, size))
    except RuntimeError as error:
        if re.search(r"\(local\) address|Unable to find address", str(error)):  # in a network of IPv6 alone, for one
            needed = "lead its name to one of its addresses in /etc/hosts, or set GLOO_SOCKET_IFNAME to its interface"
            raise InputError(f"gloo finds no network address of this host ({first_line(error)}); {needed}") from None
        if size == 1 or not _is_of_collective(error):
            raise
        raise LostRankError(describe_absent(store, size, timeout, error)) from None
    stop_signal = StopSignal(STOP_SIGNALS if hear_stop_signals else (), rank=rank)
    world = World(rank, size, local_rank, own_device, store, host_group, roll_call, stop_signal)
    _refuse_shared_gpus(world)
    return world


def lone_world() -> "World":
    """This process alone on its CPU, whatever a launcher started, for looking at a run without starting it."""
    return World(0, 1, 0, torch.device("cpu"), dist.HashStore(), None, None, StopSignal((), rank=0))


def start_fake_world(size: int) -> "World":
    """Rank 0 of `size` ranks that are not there: collectives move nothing. For counting on fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    return World(0, size, 0, torch.device("cpu"), store, None, None, StopSignal((), rank=0))


def _refuse_shared_gpus(world: "World") -> None:
    """Raises DeviceError on every rank. NCCL refuses them too, but only at the first collective of an engine.

    All ranks call it: one whose recipe differs may be on a CPU.
    """
    is_gpu = world.device.type == "cuda"
    gpus = world.gather(str(torch.cuda.get_device_properties(world.device).uuid) if is_gpu else None)
    sharing = [rank for rank, gpu in enumerate(gpus) if gpu and gpus.count(gpu) > 1]
    if sharing:
        world.stop()
        raise DeviceError(f"ranks {sharing} do not have a GPU each; {ONE_GPU_EACH}")


@dataclass(frozen=True, eq=False)
class World:
    """One process among `size`. A context manager: leaving it ends the process groups."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: dist.Store
    """The launcher's key-value store, by which background threads reach other ranks without a collective. Ask
    for a key with `check`: a `get` that waits would keep all other threads from the store."""
    _host_group: dist.ProcessGroup | None
    _roll_call: RollCall | None
    _stop_signal: "StopSignal"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def name_of(self, rank: int) -> str:
        """How messages name a rank: by its number and its host."""
        host = self._roll_call.hosts[rank] if self._roll_call else socket.gethostname()
        return f"rank {rank} (host {host})"

    def names_of(self, ranks: Sequence[int]) -> str:
        """How messages name several ranks, and of many the first ones."""
        return shortened([self.name_of(rank) for rank in ranks])

    def barrier(self) -> None:
        if self._host_group:
            dist.barrier(self._host_group)

    def sum(self, values: list[float]) -> list[float]:
        """Sums element by element over all ranks, in float64 on the host; every rank gets the sums."""
        total = torch.tensor(values, dtype=torch.float64)
        if self._host_group:
            dist.all_reduce(total, group=self._host_group)
        return total.tolist()

    def sum_on_device(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values`, which are on this rank's device, over all ranks, in place. A GPU's host does not wait."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank. Values are small and JSON-able."""
        if self._host_group is None:
            return [json.loads(json.dumps(value))]
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._host_group)
        longest = max(sizes).item()
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, F.pad(text, (0, longest - len(text))), group=self._host_group)
        return [json.loads(bytes(text[:size].tolist())) for text, size in zip(texts, sizes, strict=True)]

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank at once and returns all results, by rank. They are small and JSON-able.

        Raises:
            What `action` raises, on the ranks where it fails; OtherRankError on the others, so that none goes on alone.
        """
        result = error = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        outcomes = self.gather([result, error is not None])
        if error:
            raise error
        if failed := [rank for rank, (_, has_failed) in enumerate(outcomes) if has_failed]:
            raise OtherRankError(f"{self.names_of(failed)} could not go on; the message there says why")
        return [result for result, _ in outcomes]

    def on_main(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 while the others wait for it. Its result, as of `on_all`, comes to every rank.

        Raises: as `on_all`.
        """
        return self.on_all(action if self.is_main else lambda: None)[0]

    def alone(self) -> "World":
        """A world of this process alone, for work without the other ranks. Do not stop it."""
        return replace(self, rank=0, size=1, _host_group=None, _roll_call=None)

    def wait_for_device(self) -> None:
        """Waits until the device is idle. Only for measuring times: an ordinary step must not wait."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def note(self, doing: str) -> None:
        """Records what this rank does from now on, such as "the norm of step 7". A LostRankError says it."""
        if self._roll_call:
            self._roll_call.doing = doing

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Raises LostRankError, which names the ranks that are gone, in place of a failed collective's own error."""
        try:
            yield
        except RuntimeError as error:
            if not (self._roll_call and _is_of_collective(error)):
                raise
            log.debug("the collective that failed:", exc_info=error)
            raise self._lost(self._roll_call.describe_missing(), first_line(error)) from None

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Returns once `is_done()`, which asks the device for a collective's end. Signals are heard meanwhile.

        Raises:
            LostRankError: a rank or the store is silent, or a rank has failed. The collective would wait for its
                timeout.
        """
        pause_seconds = 1e-4
        while not is_done():
            if self._roll_call and self._roll_call.is_alarmed:
                missing = self._roll_call.describe_missing()
                if not is_done():
                    raise self._lost(missing, "a collective on the device did not end")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, 2e-3)

    @staticmethod
    def _lost(missing: str, found: str) -> LostRankError:
        why = "Their own messages, or their hosts', say why; the same command resumes"
        return LostRankError(f"{missing}. {why} from the newest checkpoint ({found})")

    def say_failed(self, error: Exception) -> None:
        """Says in the store why this rank ends, for those that wait for it. Not for a collective's error."""
        if self._roll_call and not isinstance(error, LostRankError | OtherRankError) and not _is_of_collective(error):
            self._roll_call.failure = f"{self.name_of(self.rank)} failed: {type(error).__name__}: {first_line(error)}"

    @property
    def is_stop_signalled(self) -> bool:
        """Whether this rank has received a stop signal. The others learn it from train/step_reports.py."""
        return self._stop_signal.is_signalled

    @property
    def has_lost_ranks(self) -> bool:
        """Whether a collective has failed and the lost ranks were looked for. From then on, wait for no other rank."""
        return self._roll_call is not None and self._roll_call.has_missed

    def stop(self) -> None:
        """Ends the process groups once all ranks are here. Engines must be closed before.

        It waits for gloo's threads. Without it, one may outlive the interpreter and abort the process ("terminate
        called without an active exception").
        """
        self._stop_signal.restore()
        self.barrier()
        self._end_roll_call()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        if exception_type is None or self.size == 1:
            self.stop()
        else:
            self._stop_signal.restore()  # the other ranks may never come: do not wait for them
            self._end_roll_call()

    def _end_roll_call(self) -> None:
        if self._roll_call:
            self._roll_call.end()


def _is_of_collective(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
