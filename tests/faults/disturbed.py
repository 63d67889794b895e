"""Pretraining in which one rank brings a fault about just before a step.

FAULT=RANK:STEP:NAME torchrun --nproc_per_node 2 tests/faults/disturbed.py ARGUMENTS OF launch/pretrain.py
"""

import os
import signal
import sys
import threading
from pathlib import Path

from gmlp_scale.data.loader import Loader
from launch.pretrain import main


def disturb(fault: str, trace: Path) -> None:
    """fault: RANK:STEP:NAME, NAME one of FAULTS. That rank writes its process number into `trace` first."""
    rank, step, name = fault.split(":")
    if os.environ["RANK"] != rank:
        return
    undisturbed = Loader.steps

    def steps(loader, start_step, stop_step):
        for number, micro_batches in enumerate(undisturbed(loader, start_step, stop_step), start_step + 1):
            if number == int(step):
                trace.write_text(str(os.getpid()))
                FAULTS[name]()
            yield micro_batches

    Loader.steps = steps


def _run_out_of_memory() -> None:
    """Takes more memory than its cgroup may have. Without a cgroup, sends itself the signal that the kernel sends."""
    if group := os.environ.get("MEMORY_GROUP"):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(100):
            _taken.append(b"x" * 2**24)
        raise AssertionError("the kernel let this process have 1.6 GB")
    os.kill(os.getpid(), signal.SIGKILL)


_taken: list[bytes] = []


def _end_launcher() -> None:
    _until_heard(lambda: os.kill(os.getppid(), signal.SIGTERM))


def _end_process_group() -> None:
    _until_heard(lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGTERM))


def _until_heard(send) -> None:
    """Returns once this process itself has SIGTERM too, as its launcher passes it on."""
    heard, of_run = threading.Event(), signal.getsignal(signal.SIGTERM)

    def hear(*arguments):
        heard.set()
        of_run(*arguments)

    signal.signal(signal.SIGTERM, hear)
    send()
    assert heard.wait(60), "the launcher passed no SIGTERM on"


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "end": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "out of memory": _run_out_of_memory,
    "end launcher": _end_launcher,
    "end process group": _end_process_group,
}

if __name__ == "__main__":
    if "FAULT" in os.environ:
        disturb(os.environ["FAULT"], Path(os.environ["TRACE"]))
    sys.exit(main())
