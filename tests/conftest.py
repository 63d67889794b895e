"""Options and fixtures that every test may use."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the recipes give now")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")
