"""Progress in a log file: whole lines, few of them, and no carriage returns."""

import io
import sys

import pytest

from gmlp_scale.distributed import bars
from gmlp_scale.distributed.bars import progress_bar


def shown(monkeypatch, every_seconds: float, **options) -> list[str]:
    """The lines of a job of four parts that takes four seconds."""
    clock, file = [0.0], io.StringIO()
    monkeypatch.setattr(bars.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bars, "LINE_EVERY_SECONDS", every_seconds)
    monkeypatch.setattr(sys, "stderr", file)
    for _ in progress_bar(range(4), desc="verifying", mininterval=0, **options):
        clock[0] += 1.0
    assert "\r" not in file.getvalue()
    assert not file.getvalue() or file.getvalue().endswith("\n")
    return file.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(monkeypatch):
    lines = shown(monkeypatch, every_seconds=2.0)
    assert [line.partition("|")[0] for line in lines] == ["verifying:  50%", "verifying: 100%", "verifying: 100%"]
    assert len(shown(monkeypatch, every_seconds=30.0)) == 1


def test_a_bar_that_shall_not_stay_writes_no_last_line(monkeypatch):
    assert shown(monkeypatch, every_seconds=30.0, leave=False) == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_the_usual_bar(is_terminal, monkeypatch):
    file = io.StringIO()
    file.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", file)
    list(progress_bar(range(3), mininterval=0))
    assert ("\r" in file.getvalue()) == is_terminal
