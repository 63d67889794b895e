"""Runs by torchrun, deepspeed and sbatch have the losses of one process. When hosts or ranks are lost, cut off or
stand still, the others end in time and name them. When a rank or a launcher gets SIGTERM, every rank saves.
"""

import os
import re
import signal
import time

import pytest

from tests.hosts.hosts import has_ended, wait_until
from tests.hosts.launchers import NEVER

pytestmark = pytest.mark.hosts
TIMEOUT_SECONDS = 10
LIMITED = f"engine.timeout_seconds={TIMEOUT_SECONDS}"
NAMED = r"rank \d \(host n2\) does not answer; rank \d waited in .* step \d+\."
ROWS = {"torchrun": "torchrun", "deepspeed": "deepspeed over pdsh and ssh", "sbatch": "sbatch"}


@pytest.mark.parametrize(
    "launcher, engine, num_hosts, num_ranks",
    [
        *(("torchrun", engine, 2, 1) for engine in ("fsdp2", "zero, stage 1", "zero, stage 2", "zero, stage 3")),
        ("torchrun", "fsdp2", 4, 2),
        *(("deepspeed", engine, 2, 1) for engine in ("zero, stage 1", "fsdp2")),
        ("deepspeed", "zero, stage 2", 4, 2),
        *(("sbatch", engine, 2, 1) for engine in ("fsdp2", "zero, stage 2")),
        ("sbatch", "zero, stage 3", 4, 2),
    ],
)
def test_losses_are_those_of_one_process(launcher, engine, num_hosts, num_ranks, run_of, assert_resumes, seen):
    assert_resumes(run_of(launcher, engine, num_hosts, num_ranks))
    seen(f"losses of one process, within 1e-5: {ROWS[launcher]}", f"{engine} on {num_hosts} x {num_ranks}")


def seconds_until_gone(processes: list[int], since: float) -> float:
    wait_until(lambda: all(has_ended(pid) for pid in processes), "the end of all ranks")
    return time.monotonic() - since


@pytest.mark.parametrize("launcher, engine", [("torchrun", "fsdp2"), ("deepspeed", "zero, stage 2")])
def test_a_host_that_is_lost_is_named_and_the_same_command_resumes(launcher, engine, run_of, assert_resumes, seen):
    run = run_of(launcher, engine, num_ranks=2)
    run.start_and_wait(LIMITED)
    others = list(run.hosts[0].ranks().values())
    assert len(others) == 2
    run.hosts[1].lose()
    seconds = seconds_until_gone(others, time.monotonic())
    assert all(run.end())
    named = r"rank \d \(host n2\), rank \d \(host n2\) do not answer; rank \d waited in .* step \d+\."
    assert re.search(named, run.printed()), run.printed()
    run.bring_back(run.hosts[1])
    assert_resumes(run)
    seen("a host's processes killed", f"{launcher}: the others gone after {seconds:.0f} s, and resumed")


def test_a_link_cut_for_5_seconds_does_not_hang_the_run(run_of, assert_losses, assert_resumes, seen):
    run = run_of("torchrun", "fsdp2")
    run.start_and_wait(LIMITED)
    run.hosts[1].set_link(False)
    time.sleep(5)
    run.hosts[1].set_link(True)
    if has_failed := any(run.end()):
        assert_resumes(run)
    assert_losses()
    seen("link cut for 5 s", "ended and resumed" if has_failed else "went on")


def test_a_link_cut_for_good_ends_the_ranks_of_both_sides(run_of, assert_resumes, seen):
    run = run_of("torchrun", "fsdp2")
    run.start_and_wait(LIMITED)
    both_sides = [pid for host in run.hosts for pid in host.ranks().values()]
    run.hosts[1].set_link(False)
    start = time.monotonic()
    seconds = seconds_until_gone(both_sides, start)
    connected, cut_off = run.jobs
    assert connected.end()
    of_agent = time.monotonic() - start
    assert re.search(NAMED, connected.printed()), connected.printed()
    assert "or its launcher, which hold the ranks' key-value store, is gone or cut off" in cut_off.printed()
    # The other agent waits for torch's store until its kernel gives the connection up.
    run.hosts[1].lose()
    run.bring_back(run.hosts[1])
    assert_resumes(run)
    shown = f"all ranks gone after {seconds:.0f} s with a timeout of {TIMEOUT_SECONDS}, the connected agent after"
    seen("link cut for good", f"{shown} {of_agent:.0f} s, the other still there then, and resumed")


def test_a_rank_that_stands_still_is_named(run_of, assert_resumes, seen):
    run = run_of("torchrun", "zero, stage 1")
    run.start_and_wait(LIMITED)
    (still,), others = run.hosts[1].ranks().values(), list(run.hosts[0].ranks().values())
    os.kill(still, signal.SIGSTOP)
    start = time.monotonic()
    seconds = seconds_until_gone(others, start)
    assert all(run.end())
    of_agents = time.monotonic() - start
    assert re.search(NAMED, run.jobs[0].printed()), run.printed()
    assert_resumes(run)
    shown = f"the other gone after {seconds:.0f} s with a timeout of {TIMEOUT_SECONDS}, the agents after"
    seen("SIGSTOP of a rank", f"{shown} {of_agents:.0f} s, and resumed")


@pytest.mark.parametrize("launcher, engine", [("torchrun", "fsdp2"), ("deepspeed", "zero, stage 3")])
def test_a_rank_with_sigterm_makes_all_save_and_leave(launcher, engine, run_of, assert_resumes, seen):
    run = run_of(launcher, engine)
    run.start_and_wait(NEVER)
    for process in run.hosts[1].ranks().values():
        os.kill(process, signal.SIGTERM)
    run.end_well()
    run.assert_saved()
    assert_resumes(run, is_stopped=True)
    seen("SIGTERM to a rank", f"{launcher}: all saved and left with 0, and resumed")


@pytest.mark.parametrize(
    "launcher, engine, name",
    [
        # torchrun's agents leave one another, which launch/elastic.py does not: signalled is that of the rendezvous,
        # as the other agent would wait for another's 300 s.
        ("torchrun", "fsdp2", "torchrun's agent on the rendezvous' host"),
        ("deepspeed", "zero, stage 1", "deepspeed's runner"),
    ],
)
def test_a_launcher_with_sigterm_makes_all_save(launcher, engine, name, run_of, assert_resumes, seen):
    run = run_of(launcher, engine)
    run.start_and_wait(NEVER)
    start = time.monotonic()
    os.kill(run.jobs[0].pid, signal.SIGTERM)
    codes = run.end()
    wait_until(lambda: not any(host.ranks() for host in run.hosts), "the end of all ranks")
    seconds = time.monotonic() - start
    run.assert_saved()
    assert_resumes(run, is_stopped=True)
    seen("SIGTERM to an agent or launcher", f"{name}: all saved, gone after {seconds:.0f} s with {codes}")
