"""Runs over several hosts have the losses of one process, whatever starts them."""

import pytest

from tests.hosts.launchers import Slurm, Ssh, torchrun
from tests.whole_runs import assert_close, logged

pytestmark = pytest.mark.hosts
ROW = "losses of one process, within 1e-5"
SHAPES = [(2, 1, "fsdp2"), (2, 1, "zero, stage 1"), (2, 1, "zero, stage 2"), (2, 1, "zero, stage 3"), (4, 2, "fsdp2")]


@pytest.mark.parametrize("num_hosts, num_ranks, engine", SHAPES)
def test_torchrun(num_hosts, num_ranks, engine, boot, run, undisturbed, tmp_path, seen):
    _, hosts = boot(num_hosts)
    agents = torchrun(hosts, num_ranks, run(engine, num_hosts * num_ranks))
    assert [agent.end() for agent in agents] == [0] * num_hosts, agents[0].printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen(f"{ROW}: torchrun", f"{engine} on {num_hosts} x {num_ranks}")


@pytest.mark.parametrize(
    "num_hosts, num_ranks, engine", [(2, 1, "zero, stage 1"), (2, 1, "fsdp2"), (4, 2, "zero, stage 2")]
)
def test_deepspeed(num_hosts, num_ranks, engine, boot, run, undisturbed, tmp_path, seen):
    ssh = Ssh(*boot(num_hosts))
    launcher = ssh.deepspeed(num_ranks, run(engine, num_hosts * num_ranks))
    assert launcher.end() == 0, launcher.printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen(f"{ROW}: deepspeed over pdsh and ssh", f"{engine} on {num_hosts} x {num_ranks}")


@pytest.mark.parametrize(
    "num_hosts, num_ranks, engine", [(2, 1, "fsdp2"), (2, 1, "zero, stage 2"), (4, 2, "zero, stage 3")]
)
def test_sbatch(num_hosts, num_ranks, engine, boot, run, undisturbed, tmp_path, seen):
    slurm = Slurm(*boot(num_hosts))
    job = slurm.sbatch(num_ranks, run(engine, num_hosts * num_ranks))
    assert job.end() == "COMPLETED 0:0", job.printed()
    assert_close(logged(tmp_path / "run"), undisturbed)
    seen(f"{ROW}: sbatch", f"{engine} on {num_hosts} x {num_ranks}")
