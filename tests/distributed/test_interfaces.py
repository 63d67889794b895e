"""Ranks meet on hosts whose own names resolve to 127.0.1.1, as on Debian and Ubuntu. The hosts are namespaces."""

import sys

import pytest

from tests.hosts.hosts import ROOT, booted_hosts, missing

MEET = """
import os
from gmlp_scale.distributed.world import start_world
with start_world(20, "cpu") as world:
    print(world.gather(world.rank), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.mark.skipif(missing([]) is not None, reason=f"{missing([])}")
@pytest.mark.parametrize(
    "ranks_of_hosts, own, found",
    [((2, 1), "127.0.1.1", "eth0 =eth0"), ((2,), "127.0.1.1", "None None"), ((1, 1), None, "None None")],
)
def test_hosts_whose_names_are_their_own_loopbacks_meet(ranks_of_hosts, own, found, tmp_path):
    """MASTER_ADDR is the name of the first host, as torchrun gives it. `own`: what each host takes its name for."""
    with booted_hosts(len(ranks_of_hosts), tmp_path) as (_, hosts):
        jobs = []
        for host, num_ranks in zip(hosts, ranks_of_hosts, strict=True):
            if own:
                lines = [line for line in (tmp_path / "etc_hosts").read_text().splitlines() if host.name not in line]
                (tmp_path / host.name).write_text("\n".join([f"{own} {host.name}", *lines, ""]))
                host.call("mount", "--bind", tmp_path / host.name, "/etc/hosts")
            for _ in range(num_ranks):
                ranks = {"RANK": len(jobs), "WORLD_SIZE": sum(ranks_of_hosts), "LOCAL_RANK": 0}
                variables = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": 29400, "PYTHONPATH": ROOT, **ranks}
                jobs.append(host.start(sys.executable, "-c", MEET, environment=variables))
        assert [job.end() for job in jobs] == [0] * len(jobs), [job.printed() for job in jobs]
        assert {job.printed().splitlines()[-1] for job in jobs} == {f"{[*range(len(jobs))]} {found}"}
