"""Slurm's own ways to end and restart a job, and two jobs on the same hosts."""

import re

import pytest

from gmlp_scale.checkpoint.stores import newest_checkpoint
from tests.hosts.launchers import NEVER

pytestmark = pytest.mark.hosts
MANY_STEPS = 20000
"""More than are trained before a signal comes through a launcher."""


@pytest.fixture
def run(run_of):
    return run_of("sbatch", "fsdp2")


@pytest.mark.parametrize("options", [["--signal=USR1"], ["--signal=USR1", "--full"]], ids=["ranks", "full"])
def test_a_job_that_slurm_signals_saves_and_completes(options, run, assert_resumes, seen):
    run.start_and_wait(NEVER)
    run.cluster.call("scancel", *options, run.jobs[0].number)
    run.end_well()
    run.assert_saved()
    assert_resumes(run, is_stopped=True)
    seen("Slurm's signals", f"scancel {' '.join(options)}: all saved, COMPLETED 0:0, and resumed")


def test_a_requeued_job_goes_on(run, assert_losses, seen):
    run.start_and_wait()
    run.cluster.call("scontrol", "requeue", run.jobs[0].number)
    run.jobs[0].wait_for_restart()
    run.end_well()
    assert_losses(is_stopped=True)
    assert len(re.findall("start-up", run.printed())) == 2, run.printed()  # both starts are in the one file
    seen("requeued by Slurm", "scontrol requeue: saved, resumed, one output file")


@pytest.mark.parametrize(
    "least, lost, row, shown",
    [
        (None, 1, "requeued by Slurm", "a host lost and back: resumed"),
        (1, 0, "Slurm's elastic form", "the host of the rendezvous lost and back: requeued, resumed"),
    ],
)
def test_a_job_whose_host_is_lost_is_requeued(least, lost, row, shown, run, assert_losses, seen):
    run.start_and_wait(least=least)
    run.hosts[lost].lose()
    run.jobs[0].wait_for_restart()
    run.bring_back(run.hosts[lost])
    run.end_well()
    assert_losses()
    seen(row, shown)


def test_an_elastic_job_goes_on_without_a_lost_host(run, assert_losses, seen):
    run.start_and_wait(least=1)
    run.hosts[1].lose()
    run.end_well()
    assert_losses()
    seen("Slurm's elastic form", "a host lost: finished on the other in the same job")


def test_an_elastic_job_that_slurm_signals_saves_and_completes(run, seen):
    fields = ("checkpoint.save_every_steps", "train.num_steps", "train.evaluate_every_steps")
    run.start_and_wait(*(f"{field}={MANY_STEPS}" for field in fields), least=2)
    run.cluster.call("scancel", "--signal=USR1", "--full", run.jobs[0].number)
    run.end_well()
    checkpoint, damaged = newest_checkpoint(run.run_dir / "checkpoints")
    assert "stopped after step" in run.printed() and checkpoint.step < MANY_STEPS and not damaged
    seen("Slurm's elastic form", "scancel --signal=USR1 --full: all saved, COMPLETED 0:0")


def test_two_jobs_on_the_same_hosts(run, assert_losses, seen):
    names = ("one", "two")
    run.jobs = [
        job for name in names for job in run.cluster.start(1, [*run.arguments, f"name={name}"], name=name)
    ]  # fmt: skip
    run.end_well()
    for name in names:
        assert_losses(name)
    seen("two jobs on the same hosts", "sbatch: both finished with their own losses")
