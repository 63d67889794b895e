"""Weights & Biases without a network, as WANDB_MODE=offline leaves it."""

import logging
import sys

import pytest

from gmlp_scale.engine import TrainConfig
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.train import start
from gmlp_scale.train.sinks import WandbRun

FIELDS = {"name": "smoke", "train.num_steps": 9, "data.cache_dir": None}
PASSWORD = "a-secret-password"


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", f"data.shards=s3://me:{PASSWORD}@bucket/c4"])
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()


def told(caplog) -> list[str]:
    """Our own warnings."""
    of_ours = (record for record in caplog.records if record.name.startswith("gmlp_scale"))
    return [record.getMessage() for record in of_ours if record.levelno >= logging.WARNING]


def records(folder) -> list:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), []
    (path,) = folder.glob("*.wandb")
    store.open_for_scan(str(path))
    while content := store.scan_data():
        found.append(Record.FromString(content))
    return found


def test_a_resumed_run_goes_on_and_tells_no_step_twice(wandb, tmp_path, caplog):
    tracker = WandbRun(tmp_path, FIELDS)
    for step in (1, 2, 3):
        tracker.add(step, {"train/loss": 0.5 * step})
    tracker.add(3, {"eval/loss": 2.0})
    tracker.add(2, {"train/loss": 7.0})  # as after a resume from step 1
    tracker.close()
    id = (tmp_path / "wandb_id").read_text()
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{id}")
    first = folder.rename(tmp_path / "first")  # W&B names both by the second
    resumed = WandbRun(tmp_path, FIELDS)
    assert resumed._run.id == id
    resumed.close()
    assert not told(caplog)

    found = records(first)
    (of_run,) = [record.run for record in found if record.HasField("run")]
    assert (of_run.run_id, of_run.project, of_run.display_name) == (id, "gmlp_scale", "smoke")
    config = {item.key: item.value_json for item in of_run.config.update}
    assert config["train.num_steps"] == "9" and config["data.cache_dir"] == "null"
    rows = [
        {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    shown = [{tag: value for tag, value in row.items() if tag.endswith(("_step", "loss"))} for row in rows]
    assert shown == [
        {"_step": 1, "train/loss": 0.5},
        {"_step": 2, "train/loss": 1.0},
        {"_step": 3, "train/loss": 1.5, "eval/loss": 2.0},
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(PASSWORD.encode() in path.read_bytes() for path in files)


def test_a_tracker_that_fails_is_told_once_and_ends_no_training(tmp_path, monkeypatch, wandb, caplog):
    tracker = WandbRun(tmp_path, FIELDS)
    with monkeypatch.context() as broken:
        broken.setattr(tracker._run, "log", lambda values, step: 1 / 0)
        tracker.add(1, {"train/loss": 1.0})
        tracker.add(2, {"train/loss": 1.0})
    tracker.close()
    (line,) = told(caplog)
    assert line.startswith("W&B refuses the values of step 1 (ZeroDivisionError(")


def test_a_tracker_that_cannot_be_reached_is_told_with_what_to_do(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", None)  # nobody can be asked for a key
    with pytest.raises(InputError, match=r"refuses the run \(No API key.*set WANDB_MODE=offline"):
        WandbRun(tmp_path, FIELDS)


def test_a_package_that_an_option_needs_is_asked_for_before_anything_starts(monkeypatch):
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, tracker="wandb", log_filters=True)
    start.check_packages("smoke", train)
    monkeypatch.setattr(start, "find_spec", lambda package: None)
    with pytest.raises(ConfigError) as error:
        start.check_packages("smoke", train)
    assert [mistake.partition(":")[0] for mistake in error.value.mistakes] == ["train.tracker", "train.log_filters"]
