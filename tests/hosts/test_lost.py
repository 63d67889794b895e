"""Hosts and ranks that are lost, cut off or stand still: the others end in time and say whom they miss."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.hosts.hosts import Job, has_ended, wait_until
from tests.hosts.launchers import TIMEOUT_SECONDS, Ssh, torchrun
from tests.whole_runs import assert_close, logged

pytestmark = pytest.mark.hosts
FAULT_STEP = 12
LIMITED = f"engine.timeout_seconds={TIMEOUT_SECONDS}"
NAMED = r"rank \d \(host n2\) does not answer; rank \d waited in .* step \d+\."


def wait_for_step(run_dir: Path, step: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and any(row["step"] >= step for row in logged(run_dir)), f"step {step}")


def seconds_until_gone(processes: list[int], since: float) -> float:
    wait_until(lambda: all(has_ended(pid) for pid in processes), "the end of all ranks")
    return time.monotonic() - since


def printed(jobs: list[Job]) -> str:
    return "".join(job.printed() for job in jobs)


@pytest.mark.parametrize("launcher, engine", [("torchrun", "fsdp2"), ("deepspeed", "zero, stage 2")])
def test_a_host_that_is_lost_is_named_and_the_same_command_resumes(
    launcher, engine, boot, run, undisturbed, tmp_path, seen
):
    login, hosts = boot(2)
    ssh = Ssh(login, hosts)

    def start() -> list[Job]:
        arguments = run(engine, 4, LIMITED)
        return torchrun(hosts, 2, arguments) if launcher == "torchrun" else [ssh.deepspeed(2, arguments)]

    jobs = start()
    wait_for_step(tmp_path / "run", FAULT_STEP)
    others = list(hosts[0].ranks().values())
    assert len(others) == 2
    hosts[1].lose()
    seconds = seconds_until_gone(others, time.monotonic())
    assert all(job.end() for job in jobs)
    named = r"rank \d \(host n2\), rank \d \(host n2\) do not answer; rank \d waited in .* step \d+\."
    assert re.search(named, printed(jobs)), printed(jobs)
    hosts[1].boot(login)
    ssh.serve(hosts[1])
    jobs = start()
    assert not any(job.end() for job in jobs), printed(jobs)
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen("a host's processes killed", f"{launcher}: the others gone after {seconds:.0f} s, and resumed")


def test_a_link_cut_for_5_seconds_does_not_hang_the_run(boot, run, undisturbed, tmp_path, seen):
    _, hosts = boot(2)
    arguments = run("fsdp2", 2, LIMITED)
    agents = torchrun(hosts, 1, arguments)
    wait_for_step(tmp_path / "run", FAULT_STEP)
    hosts[1].set_link(False)
    time.sleep(5)
    hosts[1].set_link(True)
    ended = [agent.end() for agent in agents]
    if any(ended):
        again = torchrun(hosts, 1, arguments)
        assert not any(agent.end() for agent in again), printed(again)
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen("link cut for 5 s", "ended and resumed" if any(ended) else "went on")


def test_a_link_cut_for_good_ends_the_ranks_of_both_sides(boot, run, undisturbed, tmp_path, seen):
    login, hosts = boot(2)
    arguments = run("fsdp2", 2, LIMITED)
    agents = torchrun(hosts, 1, arguments)
    wait_for_step(tmp_path / "run", FAULT_STEP)
    sides = [list(host.ranks().values()) for host in hosts]
    hosts[1].set_link(False)
    start = time.monotonic()
    seconds = seconds_until_gone([pid for processes in sides for pid in processes], start)
    assert agents[0].end()
    of_agent = time.monotonic() - start
    assert re.search(NAMED, agents[0].printed()), agents[0].printed()
    assert "or its launcher, which hold the ranks' key-value store, is gone or cut off" in agents[1].printed()
    # The other agent waits for torch's store until its kernel gives the connection up.
    hosts[1].lose()
    hosts[1].boot(login)
    agents = torchrun(hosts, 1, arguments)
    assert not any(agent.end() for agent in agents), printed(agents)
    assert_close(logged(tmp_path / "run"), undisturbed)
    shown = f"all ranks gone after {seconds:.0f} s with a timeout of {TIMEOUT_SECONDS}, the connected agent after"
    seen("link cut for good", f"{shown} {of_agent:.0f} s, the other still there then, and resumed")


def test_a_rank_that_stands_still_is_named(boot, run, undisturbed, tmp_path, seen):
    _, hosts = boot(2)
    arguments = run("zero, stage 1", 2, LIMITED)
    agents = torchrun(hosts, 1, arguments)
    wait_for_step(tmp_path / "run", FAULT_STEP)
    ((_, still),), others = hosts[1].ranks().items(), list(hosts[0].ranks().values())
    os.kill(still, signal.SIGSTOP)
    start = time.monotonic()
    seconds = seconds_until_gone(others, start)
    assert all(agent.end() for agent in agents)
    of_agents = time.monotonic() - start
    assert re.search(NAMED, agents[0].printed()), agents[0].printed()
    agents = torchrun(hosts, 1, arguments)
    assert not any(agent.end() for agent in agents), printed(agents)
    assert_close(logged(tmp_path / "run"), undisturbed)
    shown = f"the other gone after {seconds:.0f} s with a timeout of {TIMEOUT_SECONDS}, the agents after"
    seen("SIGSTOP of a rank", f"{shown} {of_agents:.0f} s, and resumed")
