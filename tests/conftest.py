"""Options and fixtures that every test may use."""

import logging

import pytest


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
