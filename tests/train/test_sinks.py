"""What metrics.jsonl, TensorBoard and W&B (without a network) are given, also on a full disk or with a damaged file."""

import importlib
import logging
import re
import resource
import sys
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from gmlp_scale.analysis.run_records import start_steps
from gmlp_scale.engine import TrainConfig
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.train import start
from gmlp_scale.train.filters import draw_filters
from gmlp_scale.train.sinks import EventsFile, MetricsFile, TrackerRun, picture_summary, read_metrics, recipe_summaries
from tests.gloo_ranks import run_ranks

STEPS = range(1, 8)


def _log_with_little_room(directory, no_room_at: range) -> list[str]:
    """The warnings of a process that may write no file beyond 300 bytes during the steps `no_room_at`."""
    warnings: list[str] = []
    logging.getLogger("gmlp_scale.storage.growing_file").addFilter(lambda record: warnings.append(record.getMessage()))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    files = [MetricsFile(directory / "metrics.jsonl", 0), EventsFile(directory / "tensorboard", 0)]
    for step in STEPS:
        limit = 300 if step in no_room_at else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for file in files:
            file.add(step, {"train/loss": 0.5 * step, "train/a_tag_of_some_length": 1.0})
    for file in files:
        file.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return warnings


def test_what_a_full_disk_refused_is_written_once_there_is_room(tmp_path, trials):
    (warnings,) = run_ranks(_log_with_little_room, 1, tmp_path, range(3, 6))
    of_events, of_metrics = sorted(warnings, key=lambda warning: "metrics.jsonl" in warning)
    assert "metrics.jsonl cannot be written (File too large): free room there." in of_metrics
    assert "events.out.tfevents" in of_events
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(STEPS)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(step, 0.5 * step) for step in STEPS]
    trials("full disk during logs, cache and data jobs", 2)


def test_a_run_that_ends_on_a_full_disk_says_what_is_missing(tmp_path, trials):
    (warnings,) = run_ranks(_log_with_little_room, 1, tmp_path, STEPS)
    assert [warning for warning in warnings if warning.endswith("bytes early")]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert lines and [line["step"] for line in lines] == list(STEPS)[: len(lines)]
    trials("full disk during logs, cache and data jobs", 2)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"step": 1}\n{"ste\x00p"}\n', "is damaged (Invalid control character"),
        ("\udcff\n", "is damaged ('utf-8' codec can't decode"),
        ('{"step": 1}\n{"loss": 2.0}\n', "line 2 has no step"),
        ("[1]\n", "line 1 has no step"),
        ('{"step": true}\n', "line 1 has no step"),
        ('{"step": 1, "train/loss": "low"}\n', "line 1: train/loss is no number"),
        ('{"step": 1, "eval/loss": true}\n', "line 1: eval/loss is no number"),
        ('{"step": 1}\n{"step": 9223372036854775808}\n', "line 2 has no step"),
        ('{"step": 1, "a": ' + "[" * 100_000 + "\n", "line 1 is damaged (maximum recursion depth"),
    ],
)
def test_a_damaged_file_is_one_message(text, message, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        MetricsFile(path, start_step=4)
    assert str(refused.value).startswith(str(path)) and str(refused.value).endswith("mend or remove it")


FIELDS = {
    "name": "smoke",
    "train.num_steps": 9,
    "train.compile": True,
    "optimizer.betas": [0.9, 0.999],
    "data.cache_dir": None,
}


def test_tensorboard_reads_the_recipe_the_layout_and_a_picture_and_drops_those_after_a_resume(tmp_path):
    for start_step in (0, 5):
        events = EventsFile(tmp_path, start_step)
        for summary in recipe_summaries(FIELDS):
            events.add_summary(start_step, summary)
        for step in (start_step + 4, start_step + 8):
            events.add_summary(step, picture_summary("filters", draw_filters([np.arange(8.0), np.ones(8)])))
        events.close()
    read = EventAccumulator(str(tmp_path)).Reload()

    text = read.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "| train.num_steps | `9` |" in text and "| optimizer.betas | `[0.9, 0.999]` |" in text
    assert read.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"

    session = parse_session_start_info_plugin_data(read.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    assert session.hparams["train.num_steps"].number_value == 9 and session.hparams["train.compile"].bool_value
    assert session.hparams["data.cache_dir"].string_value == "null"

    layout = Layout.FromString(read.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["Training", "Speed"]
    assert list(layout.category[0].chart[0].multiline.tag) == ["^train/loss$", "^eval/loss$"]

    pictures = read.Images("filters")
    assert [picture.step for picture in pictures] == [4, 9, 13]
    png = pictures[-1].encoded_image_string
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    assert (pictures[-1].width, pictures[-1].height) == (width, height)


def test_a_clock_that_was_set_back_hides_no_step_of_a_resumed_run(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.of_another_writer").touch()
    for start_step, clock in ((0, 1.8e9), (3, 1000.0), (5, 1.7e9)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        events = EventsFile(tmp_path, start_step)
        for step in range(start_step + 1, start_step + 5):
            events.add(step, {"train/loss": float(start_step)})
        events.close()
    read = EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")
    assert [event.value for event in read] == [0.0] * 3 + [3.0] * 2 + [5.0] * 4
    assert start_steps(str(tmp_path)) == [0, 3, 5]


PASSWORD = "a-secret-password"


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", f"data.shards=s3://me:{PASSWORD}@bucket/c4"])
    wandb = pytest.importorskip("wandb")
    yield wandb
    wandb.teardown()


def warnings_in(caplog) -> list[str]:
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


def test_a_resumed_run_goes_on_and_logs_no_step_twice(wandb, tmp_path, caplog):
    tracker = TrackerRun("wandb", tmp_path, FIELDS)
    for step in (1, 2, 3):
        tracker.add(step, {"train/loss": 0.5 * step})
    tracker.add(3, {"eval/loss": 2.0})
    tracker.add(2, {"train/loss": 7.0})  # as after a resume from step 1
    tracker.close()
    id = (tmp_path / "wandb_id").read_text()
    (folder,) = (tmp_path / "wandb").glob(f"offline-run-*-{id}")
    first = folder.rename(tmp_path / "first")  # W&B names both by the second
    resumed = TrackerRun("wandb", tmp_path, FIELDS)
    assert resumed._run.id == id
    resumed.close()
    assert not warnings_in(caplog)

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


def test_a_tracker_that_fails_is_reported_once_and_ends_no_training(tmp_path, monkeypatch, wandb, caplog):
    tracker = TrackerRun("wandb", tmp_path, FIELDS)
    with monkeypatch.context() as broken:
        broken.setattr(tracker._run, "log", lambda values, step: 1 / 0)
        tracker.add(1, {"train/loss": 1.0})
        tracker.add(2, {"train/loss": 1.0})
    tracker.close()
    (line,) = warnings_in(caplog)
    assert line.startswith("wandb refuses the values of step 1 (ZeroDivisionError(")


def test_a_tracker_that_cannot_be_reached_is_an_error_that_says_what_to_do(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "stdin", None)  # nobody can be asked for a key
    with pytest.raises(InputError, match=r"refuses the run \(No API key.*set WANDB_MODE=offline"):
        TrackerRun("wandb", tmp_path, FIELDS)


def test_trackio_goes_on_with_the_run_whose_id_is_in_the_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # which trackio reads when it is imported
    trackio = pytest.importorskip("trackio", reason="trackio brings twelve packages, so the lock does not have it")
    names = []
    for step in (1, 2):
        tracker = TrackerRun("trackio", tmp_path, FIELDS)
        tracker.add(step, {"train/loss": 0.5 * step})
        tracker.close()
        names.append(tracker._run.name)
    assert names == [f"smoke-{(tmp_path / 'trackio_id').read_text()}"] * 2 and not warnings_in(caplog)
    (run,) = trackio.Api().runs("gmlp_scale")
    assert run.config["train.num_steps"] == 9
    stored = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("gmlp_scale", names[0])
    assert [(line["step"], line["train/loss"]) for line in stored] == [(1, 0.5), (2, 1.0)]
    monkeypatch.setenv("TRACKIO_SERVER_URL", "nowhere")
    with pytest.raises(InputError, match=r"trackio, which refuses the run \(.*unset TRACKIO_SPACE_ID"):
        TrackerRun("trackio", tmp_path, FIELDS)


def test_a_package_that_an_option_needs_is_asked_for_before_anything_starts(monkeypatch):
    train = TrainConfig(num_steps=1, global_batch_size=1, micro_batch_size=1, tracker="wandb", log_filters=True)
    start.check_packages("smoke", train)
    monkeypatch.setattr(start, "find_spec", lambda package: None)
    with pytest.raises(ConfigError) as error:
        start.check_packages("smoke", train)
    assert [mistake.partition(":")[0] for mistake in error.value.mistakes] == ["train.tracker", "train.log_filters"]
