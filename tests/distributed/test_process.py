"""A process's open files, stop signals, device and memory, as a World sets them up."""

import logging
import os
import platform
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.distributed.process import DeviceError, StopSignal
from gmlp_scale.distributed.world import start_world
from tests.gloo_ranks import run_ranks

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_an_ignored_signal_stays_ignored(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with start_world(30, "cpu") as world:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not world.is_stop_signalled
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_is_logged_and_an_interrupt_after_it_does_not_wait_for_the_step(first, world, capfd):
    os.kill(os.getpid(), first)
    os.kill(os.getpid(), signal.SIGTERM)
    assert world.is_stop_signalled
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == (
        f"{first.name}: stopping after this step; Ctrl-C (SIGINT) now leaves without waiting for it\n"
    )


def test_a_signal_whose_terminal_is_gone_still_stops_the_run(monkeypatch, world):
    def write(*_) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", write)
    os.kill(os.getpid(), signal.SIGHUP)
    assert world.is_stop_signalled


def test_only_rank_0_prints_a_signal(capfd):
    stop_signal = StopSignal([signal.SIGUSR1], rank=1)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop_signal.is_signalled and capfd.readouterr().err == ""
    finally:
        stop_signal.restore()


def _open_files(hard_limit: int) -> tuple[int, list[str]]:
    """The soft limit that a run has, and its warnings."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard_limit))
    warnings, log = [], logging.getLogger("gmlp_scale.distributed.process")
    log.warning = lambda message, *values: warnings.append(message % values)
    with start_world(30, "cpu"):
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0], warnings


def test_a_run_may_open_as_many_files_as_the_hard_limit_lets_it():
    assert run_ranks(_open_files, 1, 1000) == [(1000, [])]
    ((limit, warnings),) = run_ranks(_open_files, 1, 200)
    assert limit == 200
    assert warnings[0].startswith("a process may open 200 files here, and 1 ranks may need 260: raise ulimit -Hn")


def _one_visible_gpu(uuids: list[str]) -> tuple[int, str] | str:
    """The device of a process that sees one GPU, with this UUID by rank, and the LOCAL_RANK that DeepSpeed reads."""
    rank, init_process_group = int(os.environ["RANK"]), torch.distributed.init_process_group
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda gpu: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[rank])
    torch.distributed.init_process_group = lambda backend, **options: init_process_group("gloo", **options)
    try:
        with start_world(30) as world:
            return world.device.index, os.environ["LOCAL_RANK"]
    except DeviceError as error:
        return str(error)


def test_a_process_takes_the_only_gpu_that_it_sees_unless_another_has_it():
    one, other = "6f1f4a52-0d5e-3b1c-9a57-1c2d3e4f5a6b", "6f1f4a53-0d5e-3b1c-9a57-1c2d3e4f5a6b"
    assert run_ranks(_one_visible_gpu, 2, [one, other]) == [(0, "0"), (0, "0")]
    for error in run_ranks(_one_visible_gpu, 2, [one, one]):
        assert error.startswith("ranks [0, 1] do not have a GPU each; start as many processes on a node as it has GPUs")


def _page_faults_of_freed_tensors(starts: bool) -> list[int]:
    if starts:
        start_world(30, "cpu")
    num_faults = []
    for mebibytes in (48, 46, 44, 42):  # each fits where the one before was; glibc itself keeps up to 32
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(mebibytes * 2**18)
        num_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return num_faults[1:]


def _huge_pages_kib() -> int:
    start_world(30, "cpu")
    _ = torch.ones(2**23)
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages"))


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="needs glibc 2.35, which may keep more than 32 MiB")
def test_a_cpu_process_keeps_the_memory_that_its_tensors_free(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # huge pages need few faults, kept or not
    (faults,), (kept_faults,) = (run_ranks(_page_faults_of_freed_tensors, 1, starts) for starts in (False, True))
    assert min(faults) > 5000 and max(kept_faults) < 500


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="there are no huge pages here"
)
def test_a_cpu_process_has_huge_pages(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    assert run_ranks(_huge_pages_kib, 1) > [2**14]
