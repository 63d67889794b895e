"""Options and fixtures that every test may use."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what the recipes give now")


@pytest.fixture
def update_golden(request) -> bool:
    return request.config.getoption("--update-golden")
