"""Checkpoints of several files a rank."""

import pytest

from gmlp_scale.checkpoint import pieces


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(pieces, "FILE_BYTES", 50)
