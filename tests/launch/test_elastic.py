"""What launch/elastic.py refuses, and which failures it restarts after. tests/hosts/test_elastic.py has its runs."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from launch import elastic
from launch.elastic import main
from tests.forked import Script

OPTIONS = ["--ranks-per-host", "1", "--rendezvous", "login:29400", "--config", "configs/pretrain/smoke.yaml"]


def test_a_range_with_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--hosts", "2:4", *OPTIONS, "engine.kind=fsdp2"])
    assert main() == 2
    wanted = "found 4; 3 ranks x micro_batch_size must divide train.global_batch_size = 8"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("bounds", ["0:4", "4:2", "few"])
def test_bounds_that_are_none_are_refused(bounds, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--hosts", bounds, *OPTIONS])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and f"--hosts: found {bounds}; needed: two numbers" in capsys.readouterr().err


def stand_for_pretrain(folder: Path) -> None:
    """Has launch/elastic.py start folder/pretrain.py, which needs no server that imports what is slow."""
    elastic.__file__ = str(folder / "elastic.py")
    elastic._Agent.start_method = "fork"


def start(folder: Path, rank: str) -> tuple[int, str, int]:
    """A job of one rank, which runs the lines `rank` after it has counted its start: exit code, errors and starts."""
    starts = folder / "starts"
    (folder / "pretrain.py").write_text(f"print(file=open({str(starts)!r}, 'a'))\nimport os, sys\n{rank}\n")
    words = ["--hosts", "1", "--ranks-per-host", "1", "--rendezvous", "localhost:0", "--config", OPTIONS[-1]]
    job = Script("launch/elastic.py", [*words, f"output_dir={folder}"], prepare=partial(stand_for_pretrain, folder))
    code, _, errors = job.end()
    return code, errors, len(starts.read_text())


def test_a_failure_that_a_start_would_meet_again_ends_the_run_with_its_message(tmp_path):
    report = json.dumps({"message": {"message": "a shard is corrupt", "extraInfo": {"timestamp": "1"}}})
    told = f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({report!r})"
    code, errors, num_starts = start(tmp_path, f"{told}\nsys.exit(2)")
    assert (code, num_starts) == (2, 1) and errors.endswith("\na shard is corrupt\n")


def test_a_failure_that_may_pass_restarts_the_ranks(tmp_path):
    code, errors, num_starts = start(tmp_path, f"sys.exit(len(open({str(tmp_path / 'starts')!r}).read()) < 2)")
    assert (code, num_starts) == (0, 2), errors
