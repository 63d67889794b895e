import json
import os
import threading

import pytest

from gmlp_scale.storage import claim
from gmlp_scale.storage.claim import ClaimedError, hold_folder


def claims(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def race(url: str, num_jobs: int) -> list[str]:
    """What becomes of jobs that start at the same moment, while the winner stays."""
    barrier, all_tried, results = threading.Barrier(num_jobs), threading.Barrier(num_jobs), []

    def job():
        barrier.wait()
        try:
            with hold_folder("OUTPUT", url):
                results.append("held")
                all_tried.wait()
        except ClaimedError as error:
            results.append(str(error))
            all_tried.wait()

    threads = [threading.Thread(target=job) for _ in range(num_jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check_races(url: str, num_races: int) -> None:
    for _ in range(num_races):
        results = race(url, 4)
        assert results.count("held") == 1
        refused = f"another job writes to OUTPUT: process {os.getpid()} on {os.uname().nodename}"
        assert sum(refused in result for result in results) == 3


def test_of_jobs_that_start_together_one_holds_the_folder(quick, tmp_path, trials):
    check_races(str(tmp_path / "claims"), 10)
    assert len(claims(tmp_path / "claims")) == 10 and all(claim["ended"] for claim in claims(tmp_path / "claims"))
    trials("two jobs on one folder", 30)


def test_a_second_job_is_refused_once_the_first_shows_life(quick, tmp_path, trials):
    url = str(tmp_path / "claims")
    with hold_folder("OUTPUT", url):
        with (
            pytest.raises(ClaimedError, match=f"process {os.getpid()} on {os.uname().nodename}"),
            hold_folder("OUTPUT", url),
        ):
            pass
        assert len(claims(tmp_path / "claims")) == 1
    with hold_folder("OUTPUT", url):
        assert len(claims(tmp_path / "claims")) == 2
    trials("two jobs on one folder", 1)


@pytest.mark.parametrize(
    ("host", "process"),
    [
        (os.uname().nodename, os.getppid()),
        (os.uname().nodename, 2**22 + 1),  # none of this container, but a job's in another one may have the number
        ("another machine", os.getppid()),
    ],
)
def test_a_claim_that_stands_still_blocks_nobody(quick, monkeypatch, tmp_path, caplog, host, process):
    monkeypatch.setattr(claim, "_GONE_AFTER_SECONDS", 0.1)
    (tmp_path / "claims").mkdir()
    left = {"host": host, "process": process, "processes": "others", "id": "x", "beats": 3, "ended": False}
    (tmp_path / "claims/000007.json").write_text(json.dumps(left))
    with hold_folder("OUTPUT", str(tmp_path / "claims")) as is_held:
        assert f"OUTPUT was held by process {process} on {host}, which has shown no sign for" in caplog.text
        assert is_held()
        assert [claim["id"] == "x" for claim in claims(tmp_path / "claims")] == [True, False]


def test_a_killed_process_of_this_machine_blocks_nobody_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(claim, "_LOOK_EVERY_SECONDS", -1.0)  # which time.sleep refuses
    (tmp_path / "claims").mkdir()
    for number, process in ((1, 2**22 + 1), (3, os.getpid())):  # more than Linux gives; a container's old number
        left = {"process": process, "processes": claim._processes(), "id": "x", "beats": 0, "ended": False}
        (tmp_path / f"claims/{number:06d}.json").write_text(json.dumps(left))
        with hold_folder("OUTPUT", str(tmp_path / "claims")):
            assert (tmp_path / f"claims/{number + 1:06d}.json").exists()
