"""Slurm's own ways to end and restart a job, and two jobs on the same hosts."""

import re

import pytest

from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.hosts.launchers import Slurm
from tests.hosts.test_lost import FAULT_STEP, wait_for_step
from tests.hosts.test_stopped import NEVER, assert_saved, training, training_of
from tests.whole_runs import assert_close, logged

pytestmark = pytest.mark.hosts
MANY_STEPS = 20000
"""More than are trained before a signal comes through a launcher."""


@pytest.mark.parametrize("options", [["--signal=USR1"], ["--signal=USR1", "--full"]], ids=["ranks", "full"])
def test_a_job_that_slurm_signals_saves_and_completes(options, boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(2))
    job = slurm.sbatch(1, run("fsdp2", 2, NEVER))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    slurm.call("scancel", *options, job.number)
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_saved(tmp_path / "run")
    job = slurm.sbatch(1, run("fsdp2", 2), name="again")
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(training(tmp_path / "run"), training_of(undisturbed))
    seen("Slurm's signals", f"scancel {' '.join(options)}: all saved, COMPLETED 0:0, and resumed")


def test_a_requeued_job_goes_on(boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(2))
    job = slurm.sbatch(1, run("fsdp2", 2))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    slurm.call("scontrol", "requeue", job.number)
    job.wait_for_restart()
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(training(tmp_path / "run"), training_of(undisturbed))
    assert len(re.findall("start-up", job.printed())) == 2, job.printed()  # both starts are in the one file
    seen("requeued by Slurm", "scontrol requeue: saved, resumed, one output file")


def test_a_job_whose_host_is_lost_is_requeued(boot, run, undisturbed, tmp_path, seen):
    login, hosts = boot(2)
    slurm = Slurm(login, hosts)
    job = slurm.sbatch(1, run("fsdp2", 2))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    hosts[1].lose()
    job.wait_for_restart()
    hosts[1].boot(login)
    slurm.serve(hosts[1])
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen("requeued by Slurm", "a host lost and back: resumed")


def test_an_elastic_job_goes_on_without_a_lost_host(boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(2))
    job = slurm.sbatch_elastic(1, run("fsdp2", 2))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    slurm.hosts[1].lose()
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen("Slurm's elastic form", "a host lost: finished on the other in the same job")


def test_an_elastic_job_that_loses_its_first_host_is_requeued(boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(2))
    job = slurm.sbatch_elastic(1, run("fsdp2", 2))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    slurm.hosts[0].lose()
    job.wait_for_restart()
    slurm.hosts[0].boot(slurm.login)
    slurm.serve(slurm.hosts[0])
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen("Slurm's elastic form", "the host of the rendezvous lost and back: requeued, resumed")


def test_an_elastic_job_that_slurm_signals_saves_and_completes(boot, run, tmp_path, seen):
    slurm = Slurm(*boot(2))
    longer = [
        f"checkpoint.save_every_steps={MANY_STEPS}",
        f"train.num_steps={MANY_STEPS}",
        f"train.evaluate_every_steps={MANY_STEPS}",
    ]
    job = slurm.sbatch_elastic(2, run("fsdp2", 2, *longer))
    wait_for_step(tmp_path / "run", FAULT_STEP)
    slurm.call("scancel", "--signal=USR1", "--full", job.number)
    assert job.end() == "COMPLETED 0:0", job.printed()
    checkpoint, damaged = newest_checkpoint(tmp_path / "run/checkpoints")
    assert "stopped after step" in job.printed() and checkpoint.step < MANY_STEPS and not damaged
    seen("Slurm's elastic form", "scancel --signal=USR1 --full: all saved, COMPLETED 0:0")


def test_two_jobs_on_the_same_hosts(boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(2))
    names = ("one", "two")
    jobs = [slurm.sbatch(1, [*run("fsdp2", 2), f"name={name}"], name=name) for name in names]
    assert [job.end() for job in jobs] == ["COMPLETED 0:0"] * 2, "".join(job.printed() for job in jobs)
    for name in names:
        assert_close(logged(tmp_path / name), undisturbed)
    seen("two jobs on the same hosts", "sbatch: both finished with their own losses")
