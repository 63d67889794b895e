"""Pretrained runs."""

from pathlib import Path

import pytest

from tests.analysis.pretrained_runs import write_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The folder of write_runs, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder
