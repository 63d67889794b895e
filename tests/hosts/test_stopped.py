"""Hosts told to stop: every rank saves, and every launcher and agent leaves."""

import os
import signal
import time
from pathlib import Path

import pytest

from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.hosts.hosts import Job, wait_until
from tests.hosts.launchers import NUM_STEPS, Ssh, torchrun
from tests.hosts.test_lost import FAULT_STEP, printed, wait_for_step
from tests.whole_runs import assert_close, logged

pytestmark = pytest.mark.hosts
NEVER = f"checkpoint.save_every_steps={10 * NUM_STEPS}"


def assert_saved(run_dir: Path) -> None:
    """At the step at which it was told to, as no save was due."""
    checkpoint, damaged = newest_checkpoint(run_dir / "checkpoints")
    assert checkpoint and FAULT_STEP <= checkpoint.step < NUM_STEPS and not damaged


@pytest.mark.parametrize("launcher, engine", [("torchrun", "fsdp2"), ("deepspeed", "zero, stage 3")])
def test_a_rank_told_to_stop(launcher, engine, boot, run, undisturbed, tmp_path, seen):
    login, hosts = boot(2)
    ssh = Ssh(login, hosts)

    def start(*more: str) -> list[Job]:
        arguments = run(engine, 2, *more)
        return torchrun(hosts, 1, arguments) if launcher == "torchrun" else [ssh.deepspeed(1, arguments)]

    jobs = start(NEVER)
    wait_for_step(tmp_path / "run", FAULT_STEP)
    for process in hosts[1].ranks().values():
        os.kill(process, signal.SIGTERM)
    assert not any(job.end() for job in jobs), printed(jobs)
    assert_saved(tmp_path / "run")
    jobs = start()
    assert not any(job.end() for job in jobs), printed(jobs)
    assert_close(training(tmp_path / "run"), training_of(undisturbed))
    seen("SIGTERM to a rank", f"{launcher}: all saved and left with 0, and resumed")


def test_an_agent_of_torchrun_told_to_stop(boot, run, undisturbed, tmp_path, seen):
    """torchrun's agents leave one another: launch/elastic.py does not."""
    _, hosts = boot(2)
    agents = torchrun(hosts, 1, run("fsdp2", 2, NEVER))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    start = time.monotonic()
    os.kill(agents[0].pid, signal.SIGTERM)  # the rendezvous' own: the other agent would wait for another's 300 s
    codes = [agent.end() for agent in agents]
    seconds = time.monotonic() - start
    assert_saved(tmp_path / "run")
    agents = torchrun(hosts, 1, run("fsdp2", 2))
    assert not any(agent.end() for agent in agents), printed(agents)
    assert_close(training(tmp_path / "run"), training_of(undisturbed))
    shown = f"torchrun's agent on the rendezvous' host: all saved, agents gone after {seconds:.0f} s with {codes}"
    seen("SIGTERM to an agent or launcher", shown)


def test_the_runner_of_deepspeed_told_to_stop(boot, run, undisturbed, tmp_path, seen):
    login, hosts = boot(2)
    ssh = Ssh(login, hosts)
    runner = ssh.deepspeed(1, run("zero, stage 1", 2, NEVER))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    start = time.monotonic()
    os.kill(runner.pid, signal.SIGTERM)
    code = runner.end()
    wait_until(lambda: not any(host.ranks() for host in hosts), "the end of all ranks")
    seconds = time.monotonic() - start
    assert_saved(tmp_path / "run")
    runner = ssh.deepspeed(1, run("zero, stage 1", 2))
    assert runner.end() == 0, runner.printed()
    assert_close(training(tmp_path / "run"), training_of(undisturbed))
    shown = f"deepspeed's runner: all saved, gone after {seconds:.0f} s, exit code {code}"
    seen("SIGTERM to an agent or launcher", shown)


def training(run_dir: Path) -> list[dict]:
    return training_of(logged(run_dir))


def training_of(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "train/loss" in row]
