"""Writes scalars and pictures beside a run's own TensorBoard files, and reads the run's starts from those.

What is added goes into subfolders, which TensorBoard shows as separate runs. If it went into the run's own folder,
TensorBoard would stop reading the run's file once a second one appears, and a resume would delete the added points.

A folder is a path or a URL.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gmlp_scale.storage.files import delete_file, download_file, is_url, list_files, upload_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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
            first_events = islice(EventFileLoader(str(path)).Load(), 3)
            starts += [event for event in first_events if event.session_log.status == SessionLog.START]
    return [start.step - 1 for start in sorted(starts, key=lambda start: start.wall_time)]
