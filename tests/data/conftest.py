"""Small real shards for the tests of the data."""

from pathlib import Path

import pytest
from hypothesis import settings

from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.data_config import DataConfig, load_manifests
from gmlp_scale.data.loader import Loader
from gmlp_scale.piecewise import Piecewise
from tests.written_shards import VOCAB_SIZE, write_tiny_shards

settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")


def plan_of(fields: dict) -> BatchPlan:
    """A plan of the fields that name a plan's, which it takes out of `fields`; else of 8 rows a step, 2 at a time."""
    batch_sizes = Piecewise(fields.pop("global_batch_size", 8))
    sizes = {"seed": 0, "micro_batch_size": 2, "rank": 0, "world_size": 1}
    return BatchPlan(batch_sizes=batch_sizes, **{name: fields.pop(name, default) for name, default in sizes.items()})


@pytest.fixture
def write_shards(tmp_path):
    """write_shards([rows of each train shard], [rows of each held-out shard]) -> (folder, all train rows)."""

    def write(train: list[int], heldout: list[int] = (), *, sequence_length: int = 16, folder: Path | None = None):
        folder = folder or tmp_path / "shards"
        rows = write_tiny_shards(folder, train, heldout, sequence_length=sequence_length)
        return folder, rows

    return write


@pytest.fixture
def make_loader(tmp_path):
    """make_loader(folder, data fields..., loader fields...) -> Loader, closed at the test's end.

    Without a folder, the data fields have the shards.
    """
    loaders = []

    def make(folder=None, *, data=None, **fields):
        settings = {"sequence_length": 16, "vocab_size": VOCAB_SIZE, "run_dir": tmp_path / "run"} | fields
        plan, config = plan_of(settings), DataConfig(**({"shards": str(folder)} | (data or {})))
        manifests = load_manifests(config, settings["sequence_length"], settings["vocab_size"])
        loader = Loader(config, plan, manifests, run_dir=settings["run_dir"])
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()
