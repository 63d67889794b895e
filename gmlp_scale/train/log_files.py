"""Files that a run adds to: metrics.jsonl and TensorBoard's events. A full disk delays them and never ends the run."""

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import read_file, redacted, write_text
from gmlp_scale.storage.growing_file import GrowingFile

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary


class MetricsFile(GrowingFile):
    """metrics.jsonl, or another file with a JSON line for each step of some kind.

    The lines of steps after `start_step`, and a last line that a kill cut short, are taken out first.
    """

    def __init__(self, path: Path, start_step: float = math.inf):
        self.of_start_step: list[dict[str, Any]] = []
        """The lines of `start_step` that the file has already."""
        if path.exists():
            kept = [values for values in read_metrics(path) if values["step"] <= start_step]
            write_text(path, "".join(json.dumps(values) + "\n" for values in kept))
            self.of_start_step = [values for values in kept if values["step"] == start_step]
        super().__init__(path)

    def add(self, step: int, values: dict[str, Any]) -> None:
        self.write(json.dumps({"step": step, **values}).encode() + b"\n")


class EventsFile(GrowingFile):
    """TensorBoard's events. TensorBoard drops events of earlier files that are of steps after `start_step`.

    torch's SummaryWriter would not do: its thread ends at the first failure and leaves half an event, and TensorBoard
    reads nothing after that.
    """

    def __init__(self, directory: Path, start_step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True)
        super().__init__(directory / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}")
        self._records = RecordWriter(self)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.add_summary(step, Summary(value=scalars))

    def add_summary(self, step: int, summary: "Summary") -> None:
        """Adds what is not a scalar, as gmlp_scale/train/events.py makes it."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._add(Event(step=step, summary=summary))

    def _add(self, event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl at a path or URL; a last line cut short by a kill is left out.

    InputError if a line is damaged or has no step.
    """
    try:
        lines = read_file(path).decode().splitlines(keepends=True)
        metrics = [json.loads(line) for line in lines if line.endswith("\n")]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(redacted(f"{path} is damaged ({error}): mend or remove the line")) from None
    for number, line in enumerate(metrics, start=1):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise InputError(redacted(f"{path}: line {number} has no step: mend or remove the line"))
    return metrics
