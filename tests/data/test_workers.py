"""Workers end with the process that started them, however that ends, although they hear no stop signals."""

import os
import signal
import time
from pathlib import Path

import pytest

from gmlp_scale.data.workers import made_ahead
from tests.forked import fork

_kept = []


def _start_and_end(path: Path, how: str) -> None:
    batches = made_ahead(lambda key: os.getpid(), range(100), num_workers=2, prefetch_batches=1)
    pids = [next(batches), next(batches)]
    path.write_text(" ".join(map(str, pids)))
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closed":
            batches.close()
            assert not any(is_running(pid) for pid in pids)
        case "left open":
            _kept.append(batches)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("closed", 0), ("left open", 0)])
def test_workers_end_with_their_parent(how, code, tmp_path):
    process = fork(_start_and_end, tmp_path / "pids", how)
    process.join(60)
    assert process.exitcode == code
    deadline = time.monotonic() + 60
    while any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
