"""Checkpoints of several files a rank."""

import pytest

from gmlp_scale.checkpoint import checkpoint_files


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 50)
