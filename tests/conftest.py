"""Options and fixtures that every test may use."""

import logging

import pytest

from gmlp_scale import claim


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the recipes give now")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def restored_log():
    """A launcher that a test calls sets up its own log, which hides the lines from the tests after it."""
    log = logging.getLogger("gmlp_scale")
    handlers, propagate, level = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.fixture
def quick(monkeypatch):
    """Claims that change often and are not given up while they do, however slow the machine. Processes never seem to
    have ended."""
    monkeypatch.setattr(claim, "_BEAT_SECONDS", 0.05)
    monkeypatch.setattr(claim, "_GONE_AFTER_SECONDS", 600.0)
    monkeypatch.setattr(claim, "_LOOK_EVERY_SECONDS", 0.02)
    monkeypatch.setattr(claim, "_is_other_process", lambda process: True)
