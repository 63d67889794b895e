"""How the ranks meet: a launcher's variables say which each is; it joins the key-value store and says that it came."""

import fcntl
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from gmlp_scale.distributed.roll_call import shortened
from gmlp_scale.errors import InputError, LostRankError
from gmlp_scale.storage.files import redacted

_SIOCGIFADDR = 0x8915
"""The Linux kernel's request for an interface's IPv4 address."""
_MOST_RANKS, _MOST_PORT = 10**6, 2**16 - 1


@dataclass(frozen=True)
class Launched:
    """This process among those that a launcher started."""

    size: int
    rank: int
    local_rank: int
    address: str
    port: int


def launched() -> Launched:
    """What the variables say that torchrun and deepspeed set; without them this process is alone.

    Raises:
        InputError: with every variable that is missing or no number within its bounds.
    """
    mistakes: list[str] = []

    def number(name: str, least: int, most: int, default: str) -> int:
        text = os.environ.get(name, default)
        if re.fullmatch("[0-9]{1,9}", text) and least <= int(text) <= most:
            return int(text)
        mistakes.append(f"{name}: found {text!r}; needed: a number from {least} to {most}")
        return least

    size = number("WORLD_SIZE", 1, _MOST_RANKS, "1")
    is_alone = size == 1
    rank, local_rank = (number(name, 0, size - 1, "0" if is_alone else "") for name in ("RANK", "LOCAL_RANK"))
    port, address = number("MASTER_PORT", 1, _MOST_PORT, "1" if is_alone else ""), os.environ.get("MASTER_ADDR", "")
    if not address and not is_alone:
        mistakes.append("MASTER_ADDR: found ''; needed: the host of rank 0")
    if mistakes:
        needed = "start the processes with torchrun or deepspeed, which set all five, or set them so"
        raise InputError("\n  ".join(["the launcher's variables cannot be used", *mistakes, needed]))
    return Launched(size, rank, local_rank, address, port)


def join_store(place: Launched, timeout: timedelta, run: str) -> dist.Store:
    """The ranks' key-value store, at MASTER_ADDR and MASTER_PORT: torchrun's agent has it, or else rank 0.

    Raises:
        InputError: the port is another job's, or the store belongs to another run.
        LostRankError: rank 0 was not there within the timeout.
    """
    rank, address, port = place.rank, place.address, place.port
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    host = f"[{address}]" if ":" in address else address  # an address of IPv6
    found, needed = f"the ranks' key-value store at {host}:{port}", "give each job on a host its own MASTER_PORT"
    try:
        # It does not wait for its clients: a stranger would be counted among them.
        store = dist.TCPStore(address, port, place.size, is_host, timeout, wait_for_workers=False)
        if rank == 0:
            store.set("run", redacted(run))
        host_run = store.get("run").decode()
    except dist.DistNetworkError as error:
        if is_host:
            raise InputError(f"{found} cannot be opened ({first_line(error)}); {needed}") from None
        raise LostRankError(f"rank {rank} did not reach {found}: {first_line(error)}") from None
    except dist.DistStoreError:
        seconds = timeout.total_seconds()
        raise LostRankError(f"rank 0 did not come to {found} in {seconds:.0f} s: its own message says why") from None
    if host_run != redacted(run):
        raise InputError(f"{found} belongs to the run {host_run}, and this rank {rank} to {redacted(run)}; {needed}")
    store.set(f"came/{rank}", socket.gethostname())
    return store


def hosts_of(store: dist.Store, size: int) -> list[str]:
    """The name of each rank's host, once all have joined the store."""
    return [name.decode(errors="replace") for name in store.multi_get([f"came/{rank}" for rank in range(size)])]


def name_interface(store: dist.Store, place: Launched) -> None:
    """Names gloo and NCCL the network interface, if this host's name has no address that other hosts can reach.

    gloo takes the name's address, which Debian and Ubuntu make 127.0.1.1. The interface is that of the route to
    MASTER_ADDR, or on its own host that of the route to any other. Ranks that are all on one host need none.
    """
    address = _own_address(place.address)
    store.set(f"at/{place.rank}", address or "")
    if _own_address(socket.gethostname()):
        return
    if not address:
        elsewhere = filter(None, (store.get(f"at/{other}").decode() for other in range(place.size)))
        address = _own_address(next(elsewhere, ""))
    for _, name in socket.if_nameindex() if address else ():
        with suppress(OSError), socket.socket() as asking:  # an interface without an address refuses
            if socket.inet_ntoa(fcntl.ioctl(asking, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))[20:24]) == address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _own_address(host: str) -> str | None:
    """This host's IPv4 address on the route to another; None if that has no address but a loopback's."""
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # nothing is sent
        found = asking.getsockname()[0]
        return None if found.startswith("127.") else found
    return None


def describe_absent(store: dist.Store, size: int, timeout: timedelta, error: Exception) -> str:
    """Which ranks never came, after `error` kept the process groups from being made."""
    try:
        absent = [rank for rank in range(size) if not store.check([f"came/{rank}"])]
    except RuntimeError:
        absent = [0]  # it has the store, or its launcher
    if not absent:
        return f"all ranks came, but could not be connected ({first_line(error)})"
    names, seconds = shortened([f"rank {rank}" for rank in absent]), timeout.total_seconds()
    return f"{names} did not come within {seconds:.0f} s; their own messages, or their hosts', say why"


def first_line(error: Exception) -> str:
    """What torch's error says, without the file and line of its source that come first."""
    return str(error).partition("\n")[0].rpartition("] ")[2]
