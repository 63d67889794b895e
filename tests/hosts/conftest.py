"""Fixtures of the tests on several hosts."""

from contextlib import ExitStack

import pytest

from tests.forked import Script
from tests.hosts.hosts import booted_hosts, missing
from tests.hosts.launchers import RECIPE, Run
from tests.whole_runs import assert_close, finish, logged

PROGRAMS = ["/usr/sbin/sshd", "ssh", "ssh-keygen", "pdsh", "munged", "slurmctld", "slurmd", "sbatch"]


@pytest.fixture(autouse=True, scope="session")
def can_have_hosts():
    if reason := missing(PROGRAMS):
        pytest.skip(reason)


@pytest.fixture
def boot(tmp_path):
    """boot(number) -> the host `login` and the list of that many others, until the test ends."""
    with ExitStack() as stack:
        yield lambda num_hosts: stack.enter_context(booted_hosts(num_hosts, tmp_path / "hosts"))


@pytest.fixture(scope="session")
def undisturbed(forty_rows, tmp_path_factory) -> list[dict]:
    """What one process logs that nobody disturbs. It goes through the 40 rows again and again."""
    folder = tmp_path_factory.mktemp("undisturbed")
    overrides = [*RECIPE, f"data.shards={forty_rows}", f"output_dir={folder}"]
    finish([Script("launch/pretrain.py", overrides, environment={"OMP_NUM_THREADS": "1"})])
    return logged(folder / "run")


@pytest.fixture
def run_of(boot, forty_rows, tmp_path):
    """run_of(launcher, engine, number of hosts, ranks on each) -> a Run, not started yet."""
    return lambda launcher, engine, num_hosts=2, num_ranks=1: Run(
        launcher, engine, num_ranks, *boot(num_hosts), forty_rows, tmp_path
    )


@pytest.fixture
def assert_losses(undisturbed, tmp_path):
    """assert_losses(name of a run): it logged what one process logs. A stopped run evaluates at that step too."""

    def check(name: str = "run", is_stopped: bool = False) -> None:
        found, wanted = logged(tmp_path / name), undisturbed
        if is_stopped:
            found, wanted = ([row for row in rows if "train/loss" in row] for rows in (found, wanted))
        assert_close(found, wanted)

    return check


@pytest.fixture
def assert_resumes(assert_losses):
    """assert_resumes(run): started again, it ends well and has logged what one process logs."""

    def check(run: Run, is_stopped: bool = False) -> None:
        run.start()
        run.end_well()
        assert_losses(is_stopped=is_stopped)

    return check


@pytest.fixture
def seen(record_property):
    """seen(row, what was seen, lost=0) adds a trial to docs/many-nodes.md; tests/hosts/table.py has the rows."""
    from tests.hosts.table import ROWS

    def record(row: str, shown: str, lost: int = 0) -> None:
        assert row in ROWS, row
        record_property("seen", [row, lost, shown])

    return record
