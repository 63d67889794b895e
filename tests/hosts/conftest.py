"""Fixtures of the tests on several hosts."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked import Script
from tests.hosts.hosts import booted_hosts, missing
from tests.hosts.launchers import RECIPE, arguments
from tests.whole_runs import finish, logged
from tests.written_shards import write_tiny_shards

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
def shards(tmp_path_factory) -> Path:
    """40 training rows: a run goes through them again and again."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_tiny_shards(folder, [17, 23], [12], sequence_length=32)
    return folder


@pytest.fixture(scope="session")
def undisturbed(shards, tmp_path_factory) -> list[dict]:
    """What one process logs that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    overrides = [*RECIPE, f"data.shards={shards}", f"output_dir={folder}"]
    finish([Script("launch/pretrain.py", overrides, environment={"OMP_NUM_THREADS": "1"})])
    return logged(folder / "run")


@pytest.fixture
def run(shards, tmp_path):
    """run(engine, number of ranks, overrides ...) -> the arguments of launch/pretrain.py."""
    return lambda engine, num_ranks, *more: arguments(engine, num_ranks, shards, tmp_path, *more)


@pytest.fixture
def seen(record_property):
    """seen(row, what was seen, lost=0) adds a trial to docs/many-nodes.md; tests/hosts/table.py has the rows."""
    from tests.hosts.table import ROWS

    def record(row: str, shown: str, lost: int = 0) -> None:
        assert row in ROWS, row
        record_property("seen", [row, lost, shown])

    return record
