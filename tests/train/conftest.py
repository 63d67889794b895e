"""Checkpoints of several files a rank."""

import pytest

from gmlp_scale.train import checkpointer


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(checkpointer, "FILE_BYTES", 50)
