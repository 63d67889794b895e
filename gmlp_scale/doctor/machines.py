"""Every rank's machine, side by side."""

import contextlib
import os
import platform
import socket
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import torch

from gmlp_scale import __version__
from gmlp_scale.distributed.world import World

MUST_BE_EQUAL = ("device", "driver", "gmlp_scale", "python", "torch", "cuda", "nccl", "deepspeed")
SMI = {"driver": "driver_version", "MHz": "clocks.sm", "of MHz": "clocks.max.sm", "C": "temperature.gpu"}
"""Columns of the table, and what nvidia-smi calls them."""
FREE_SHARE = 0.9
"""The share of a GPU's memory that must be free before the run begins."""


def facts(world: World) -> dict[str, str]:
    """This rank's row of the table. A fact that cannot be found out is the text None."""
    found = {"rank": world.rank, "host": socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    if world.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(world.device)
        free_bytes, all_bytes = torch.cuda.mem_get_info(world.device)
        found |= {"device": gpu.name, "free GiB": f"{free_bytes / 2**30:.1f}", "of GiB": f"{all_bytes / 2**30:.1f}"}
        query = f"--query-gpu={','.join(SMI.values())}"
        said = said_by("nvidia-smi", query, "--format=csv,noheader,nounits", f"--id=GPU-{gpu.uuid}")
        found |= dict(zip(SMI, said.split(", ") if said else [None] * len(SMI), strict=True))
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    else:
        found["device"] = f"cpu ({platform.machine()})"
    found |= {"gmlp_scale": __version__, "python": platform.python_version(), "torch": torch.__version__}
    found["deepspeed"] = version_of("deepspeed")
    return {column: str(value) for column, value in found.items()}


def version_of(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def said_by(*command: str) -> str | None:
    """What a short program prints; None if it fails or is not there."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    return None


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), *(row.values() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def problems(rows: list[dict[str, str]]) -> list[str]:
    """What in the table would make a run fail, and what to change."""
    lines = []
    for column in (column for column in MUST_BE_EQUAL if column in rows[0]):
        usual, _ = Counter(row.get(column) for row in rows).most_common(1)[0]
        others = [f"rank {row['rank']} on {row['host']} {row.get(column)}" for row in rows if row.get(column) != usual]
        if others:
            lines.append(
                f"{column}: most ranks have {usual}, {', '.join(others)}; start the run on equal machines with one "
                "environment"
            )
    for row in rows:
        if "free GiB" in row and float(row["free GiB"]) < FREE_SHARE * float(row["of GiB"]):
            lines.append(
                f"rank {row['rank']} on {row['host']}: only {row['free GiB']} of {row['of GiB']} GiB of its GPU's "
                "memory are free; end the other programs there (nvidia-smi lists them)"
            )
    return lines
