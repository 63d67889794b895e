"""Runs a test's function in Triton's interpreter, where no GPU is needed."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.gloo_ranks import run_ranks


def run_interpreted(function: Callable, *arguments: Any, world_size: int = 1) -> list[Any]:
    """run_ranks in new processes that know of the interpreter before they import Triton; results by rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        return run_ranks(function, world_size, *arguments)
