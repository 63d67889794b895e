"""What launch/elastic.py refuses, which failures it restarts after, and when a run is finished.

tests/hosts/test_elastic.py has its runs.
"""

import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from gmlp_scale.recipe.reader import load_run_config
from launch import elastic
from launch.elastic import is_finished, main
from tests.checkpoint.fake_engine import save_steps
from tests.forked import Script
from tests.whole_runs import SMOKE

OPTIONS = ["--ranks-per-host", "1", "--rendezvous", "login:29400", "--config", "configs/pretrain/smoke.yaml"]

BAD_WORDS = {
    "--ranks-per-host": ["0"],
    "--max-restarts": ["-1", "9" * 5000],
    "--unfinished-code": ["256"],
    "--rendezvous": ["login", "login:port", "login:0", "login:99999"],
}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--hosts", "2:4", "engine.kind=fsdp2"], "3 ranks x micro_batch_size must divide train.global_batch_size = 8"),
        *((["--hosts", bounds], f"--hosts: found {bounds}; needed: two numbers") for bounds in ("0:4", "4:2", "few")),
        *(
            (["--hosts", "2", option, word], f"argument {option}: found {word}; needed: ")
            for option, words in BAD_WORDS.items()
            for word in words
        ),
    ],
)
def test_hosts_and_ranks_that_cannot_be_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elastic.py", *OPTIONS, *words])
    try:
        code = main()
    except SystemExit as left:  # argparse's own refusals
        code = left.code
    assert code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saved", "fields", "finished"),
    [
        ([], [], False),
        ([4, 8], [], False),
        ([8, 9], [], True),
        ([4], ["train.stop_after_step=4"], True),
        ([4, 8], ["train.stop_after_step=4"], True),
    ],
)
def test_a_run_is_finished_by_its_newest_checkpoint(saved, fields, finished, tmp_path):
    run = load_run_config(SMOKE, [f"output_dir={tmp_path}", "train.num_steps=9", *fields])
    run.run_dir.mkdir()
    save_steps(run.run_dir / "checkpoints", saved)
    assert is_finished(run) == finished
    if saved == [8, 9]:
        (run.run_dir / "checkpoints" / "step_000000009" / "DONE").write_text("{}")
        assert not is_finished(run), "a start would go on from step 8"


REPORT = """report = {"message": {"message": "a shard is corrupt", "extraInfo": {"timestamp": "1"}}}
json.dump(report, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(2)"""


def stand_for_pretrain(folder: Path) -> None:
    """Has launch/elastic.py start folder/pretrain.py, which needs no server that imports what is slow."""
    elastic.__file__ = str(folder / "elastic.py")
    elastic._Agent.start_method = "fork"
    elastic.HEARD_AFTER_SECONDS = 3.0


def start(folder: Path, rank: str, num_hosts: int = 1) -> list[tuple[int, str, str]]:
    """A job with one rank on each of some hosts, which are one: it adds a line to folder/starts, then runs `rank`."""
    count = f"print(file=open({str(folder / 'starts')!r}, 'a'))"
    (folder / "pretrain.py").write_text(f"import json, os, sys, time\n{count}\n{rank}\n")
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["--hosts", num_hosts, "--ranks-per-host", 1, "--rendezvous", f"localhost:{port}", *OPTIONS[-2:]]
    prepare = partial(stand_for_pretrain, folder)
    jobs = [Script("launch/elastic.py", [*words, "engine.kind=fsdp2"], prepare=prepare) for _ in range(num_hosts)]
    return [job.end() for job in jobs]


def in_vain(seconds: int) -> None:
    elastic.RENDEZVOUS += f",read_timeout={seconds},join_timeout={seconds}"
    elastic._start_rank_server = lambda: None


@pytest.mark.parametrize(
    "place, found", [("nobody.invalid:29400", "timed out"), ("localhost:0", "fewer than 2 hosts came in time")]
)
def test_hosts_that_do_not_meet_are_one_line(place, found):
    with socket.create_server(("localhost", 0)) as taken:
        place = place.replace(":0", f":{taken.getsockname()[1]}")
    words = ["--hosts", "2", "--ranks-per-host", "1", "--rendezvous", place, *OPTIONS[-2:], "engine.kind=fsdp2"]
    code, _, errors = Script("launch/elastic.py", words, prepare=partial(in_vain, 2)).end()
    assert code == 1 and "Traceback" not in errors, errors
    assert f"smoke: the hosts do not meet at {place}: " in errors.splitlines()[-1] and found in errors.splitlines()[-1]


def num_starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_a_failure_that_a_start_would_meet_again_ends_the_run_with_its_message(tmp_path):
    ((code, _, errors),) = start(tmp_path, REPORT)
    assert (code, num_starts(tmp_path)) == (2, 1) and errors.endswith("\na shard is corrupt\n")


def test_such_a_failure_on_one_host_ends_the_run_on_all(tmp_path):
    """The other host's rank leaves as one does that misses another rank."""
    jobs = start(tmp_path, f"if os.environ['RANK'] == '1':\n    time.sleep(1)\n    sys.exit(1)\n{REPORT}", num_hosts=2)
    ended = {code: errors for code, _, errors in jobs}
    assert ended.keys() == {2, 3} and num_starts(tmp_path) == 2, jobs
    assert ended[2].endswith("\na shard is corrupt\n") and "has ended on another host" in ended[3]


def test_a_failure_that_may_pass_restarts_the_ranks(tmp_path):
    ((code, _, errors),) = start(tmp_path, f"sys.exit(len(open({str(tmp_path / 'starts')!r}).read()) < 2)")
    assert (code, num_starts(tmp_path)) == (0, 2), errors
