"""A tiny export, with the small tokenizer and files of tests/tasks."""

from pathlib import Path

import pytest
import torch

from gmlp_scale.distributed.world import start_world
from tests.finetune.small_recipes import write_tiny_export
from tests.tasks import conftest as tasks

tokenizer_folder, write_squad = tasks.tokenizer_folder, tasks.write_squad


@pytest.fixture(scope="session")
def export(tmp_path_factory, tokenizer_folder) -> Path:
    """A tiny gMLP of 128 positions."""
    torch.set_num_threads(1)
    return write_tiny_export(tmp_path_factory.mktemp("export") / "gmlp", tokenizer_folder)


@pytest.fixture
def world():
    with start_world(60, device="cpu") as world:
        yield world
