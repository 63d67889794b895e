"""Logs on a full disk: training is told once and goes on, and nothing is missing afterwards. And damaged ones."""

import logging
import re
import resource

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmlp_scale.errors import InputError
from gmlp_scale.train.sinks import EventsFile, MetricsFile, read_metrics
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
    "text, told",
    [
        ('{"step": 1}\n{"ste\x00p"}\n', "is damaged (Invalid control character"),
        ("\udcff\n", "is damaged ('utf-8' codec can't decode"),
        ('{"step": 1}\n{"loss": 2.0}\n', "line 2 has no step"),
        ("[1]\n", "line 1 has no step"),
    ],
)
def test_a_damaged_file_is_one_message(text, told, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match=re.escape(told)) as refused:
        MetricsFile(path, start_step=4)
    assert str(refused.value).startswith(str(path)) and str(refused.value).endswith("mend or remove the line")
