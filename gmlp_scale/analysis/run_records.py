"""Reads what runs left in their folders, and adds to their TensorBoard files. A folder is a path or a URL.

config.yaml is read as plain YAML and not as a recipe: runs of other versions, and finetuning runs, can be compared too.

What is added goes into subfolders, which TensorBoard shows as separate runs. If it went into the run's own folder,
TensorBoard would stop reading the run's file once a second one appears, and a resume would delete the added points.
"""

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmlp_scale.checkpoint.format import Checkpoint, CheckpointError
from gmlp_scale.checkpoint.saved_run import config_path
from gmlp_scale.checkpoint.stores import checkpoints_of, newest_of
from gmlp_scale.errors import InputError
from gmlp_scale.fields import flatten
from gmlp_scale.recipe.reader import read_yaml
from gmlp_scale.storage.files import delete_file, download_file, is_url, list_files, redacted, upload_file
from gmlp_scale.train.sinks import read_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunRecord:
    folder: str
    name: str
    """The recipe's name; the folder if two runs have the same name."""
    config: dict[str, Any]
    """The resolved config's values by field, such as train.num_steps."""
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl, in the order of steps. At least one."""
    restarts: list[int] | None
    """The step of each resume after which the run trained on. None if there are no events that say it."""
    skipped: list[dict[str, Any]]
    """The updates that were left out."""
    newest: Checkpoint | None
    """The newest checkpoint whose DONE can be read. Its weights are neither read nor checked."""

    @property
    def last_step(self) -> int:
        return self.lines[-1]["step"]

    def curve(self, tag: str) -> list[tuple[int, float]]:
        return curve(self.lines, tag)


def curve(lines: Sequence[dict[str, Any]], tag: str) -> list[tuple[int, float]]:
    """(step, value) of each line that has a number for the tag. Values may be NaN or infinite."""
    return [(line["step"], float(line[tag])) for line in lines if type(line.get(tag)) in (int, float)]


def read_run_records(run_folders: Sequence[str]) -> list[RunRecord]:
    """Reads the runs. InputError names every folder that holds none, or one without metrics."""
    records, problems = [], []
    for folder in run_folders:
        try:
            records.append(_read(folder.rstrip("/")))
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    num_of_name = Counter(record.name for record in records)
    return [record if num_of_name[record.name] == 1 else replace(record, name=record.folder) for record in records]


def _read(folder: str) -> RunRecord:
    config = dict(flatten(read_yaml(config_path(folder))))
    lines = read_metrics(f"{folder}/metrics.jsonl")
    if not lines:
        raise InputError(redacted(f"{folder} has no metrics yet: give a run whose metrics.jsonl has a line"))
    starts, last_step = start_steps(f"{folder}/tensorboard"), lines[-1]["step"]
    return RunRecord(
        folder=redacted(folder),
        name=str(config.get("name", folder)),
        config=redacted(config),
        lines=lines,
        restarts=[step for step in starts[1:] if step < last_step] if starts else None,
        skipped=read_metrics(f"{folder}/skipped_steps.jsonl"),
        newest=_newest(folder),
    )


def _newest(folder: str) -> Checkpoint | None:
    """As in RunRecord; a warning names those that cannot be read."""
    with checkpoints_of(folder) as checkpoints:
        try:
            return newest_of(checkpoints, verify_files=False)[0]
        except CheckpointError as error:
            log.warning("%s", error)
            return None


@contextmanager
def open_writer(folder: str, *, replacing: bool = False) -> Iterator["SummaryWriter"]:
    """Adds what the block writes to `folder`, or replaces what was there."""
    from torch.utils.tensorboard import SummaryWriter

    if not is_url(folder):
        if replacing:
            shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(folder) as writer:
            yield writer
        return
    for name in list_files(folder) if replacing else ():
        delete_file(f"{folder}/{name}")
    with tempfile.TemporaryDirectory() as local:
        with SummaryWriter(local) as writer:
            yield writer
        for path in Path(local).iterdir():
            upload_file(path, f"{folder}/{path.name}")


def start_steps(folder: str) -> list[int]:
    """How many steps were finished at each start of the run whose events lie in `folder`, in the order of the starts.

    train/sinks.py begins a new file of events, and says so in it, whenever a run starts or is resumed.
    """
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog

    starts = []
    with tempfile.TemporaryDirectory() as copies:
        for name in list_files(folder):
            if "/" in name or ".tfevents." not in name:  # subfolders hold what was added later
                continue
            path = Path(copies, name) if is_url(folder) else Path(folder, name)
            if is_url(folder):
                download_file(f"{folder}/{name}", path)
            if not path.is_file():  # a pipe or a device, which may never end
                continue
            first_events = islice(EventFileLoader(str(path)).Load(), 3)
            starts += [event for event in first_events if event.session_log.status == SessionLog.START]
    return [start.step - 1 for start in sorted(starts, key=lambda start: start.wall_time)]
