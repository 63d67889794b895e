"""What a process says: the error that ends it, under any launcher, its log, and bars that a log file can hold."""

import io
import logging
import re
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from tqdm import tqdm

from gmlp_scale.distributed import logs
from gmlp_scale.distributed.logs import command, progress_bar, report, set_up_logging
from gmlp_scale.errors import InputError, LostRankError, UserError
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.storage.files import PlaceError


def test_rank_0_prints_an_error_at_once_and_the_others_only_if_they_live_on(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(logs.time, "sleep", slept.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        report(ValueError("no shards at s3://me:secret@bucket/c4"))
    assert slept == [logs.OTHERS_REPORT_AFTER_SECONDS]
    assert capsys.readouterr().err == "no shards at s3://***@bucket/c4\n" * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("--step is 7"), 2),
        (UserError("another job holds outputs/a"), 1),
        (FileNotFoundError("no shards"), 2),
        (OSError("the disk is full"), 1),
        (PlaceError("foo://x cannot be opened"), 2),
        (PermissionError("recipe.yaml"), 2),
    ],
)
def test_a_command_prints_a_users_mistake_in_its_words_and_returns_its_code(error, code, capsys):
    @command
    def main() -> int:
        raise error

    assert main() == code and capsys.readouterr().err == f"{error}\n"


def test_an_argument_that_is_no_utf_8_can_be_named(capsys):
    @command
    def main() -> int:
        raise InputError("recipe_\udcff.yaml cannot be read")

    assert main() == 2 and capsys.readouterr().err == "recipe_\\udcff.yaml cannot be read\n"


def test_an_interrupted_command_ends_in_one_line(capsys):
    @command
    def main() -> int:
        raise KeyboardInterrupt

    assert main() == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_command_lets_an_error_of_ours_keep_its_traceback(capsys):
    @command
    def main() -> int:
        (_,) = 1, 2

    with pytest.raises(ValueError, match="too many values to unpack"):
        main()
    assert capsys.readouterr().err == ""


def test_a_lost_rank_is_reported_at_once_and_without_the_launcher(monkeypatch, capsys, tmp_path):
    """The launcher of a host that was cut off stands still, so its report never comes."""
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: pytest.fail("it waits"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report(LostRankError("rank 0 (host n1) does not answer"))
    assert capsys.readouterr().err == "rank 0 (host n1) does not answer\n" and not list(tmp_path.iterdir())


def test_torchrun_ends_its_report_with_our_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report(ConfigError("smoke.yaml", ["seed: found 'x'; needed: a valid integer"]))
    assert capsys.readouterr().err == "", "it would be printed twice"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    shown = str(ChildFailedError("launch/pretrain.py", {0: failure})).splitlines()
    assert shown[-3] == "  traceback : smoke.yaml: 1 mistake"
    assert shown[-2] == "    seed: found 'x'; needed: a valid integer"


def test_log_lines_of_one_process_name_no_rank(world, capsys):
    set_up_logging(world)
    set_up_logging(world)  # twice must not double the lines
    logging.getLogger("gmlp_scale.train").info("step 1")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO step 1", line)


def lines_of_a_bar(monkeypatch, every_seconds: float, **options) -> list[str]:
    """The lines of a job of four parts that takes four seconds."""
    clock, file = [0.0], io.StringIO()
    monkeypatch.setattr(logs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(logs, "LINE_EVERY_SECONDS", every_seconds)
    monkeypatch.setattr(sys, "stderr", file)
    for _ in progress_bar(range(4), desc="verifying", mininterval=0, **options):
        clock[0] += 1.0
    assert "\r" not in file.getvalue()
    assert not file.getvalue() or file.getvalue().endswith("\n")
    return file.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(monkeypatch):
    lines = lines_of_a_bar(monkeypatch, every_seconds=2.0)
    assert [line.partition("|")[0] for line in lines] == ["verifying:  50%", "verifying: 100%", "verifying: 100%"]
    assert len(lines_of_a_bar(monkeypatch, every_seconds=30.0)) == 1


def test_a_bar_that_shall_not_stay_writes_no_last_line(monkeypatch):
    assert lines_of_a_bar(monkeypatch, every_seconds=30.0, leave=False) == []


def test_a_bar_beside_another_moves_no_cursor(monkeypatch):
    with tqdm(file=io.StringIO()):
        assert len(lines_of_a_bar(monkeypatch, every_seconds=30.0)) == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_the_usual_bar(is_terminal, monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", file)
    list(progress_bar(range(3), mininterval=0))
    assert ("\r" in file.getvalue()) == is_terminal
