"""Pretrained runs, and launchers called in this process."""

import sys
from pathlib import Path

import pytest

from tests.analysis.pretrained_runs import write_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The folder of write_runs, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder


@pytest.fixture
def launched(monkeypatch, capsys):
    """launched(main, options...) -> (exit code, what it printed, its error)."""

    def run(main, *options) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launcher", *map(str, options)])
        try:
            code = main()
        except SystemExit as end:  # argparse's own refusals
            code = end.code
        return code, *capsys.readouterr()

    return run
