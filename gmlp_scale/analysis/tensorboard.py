"""Writes scalars and pictures beside a run's own TensorBoard files, and reads the run's starts from those.

What is added goes into subfolders, which TensorBoard shows as separate runs. If it went into the run's own folder,
TensorBoard would stop reading the run's file once a second one appears, and a resume would delete the added points.

A folder is a path or a URL.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gmlp_scale.storage.files import delete_file, download_file, is_url, list_files, upload_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def replace_scalars(folder: str, scalars_of_step: Mapping[int, Mapping[str, float]]) -> None:
    """Writes these scalars to `folder` and deletes what was there."""
    if is_url(folder):
        for name in list_files(folder):
            delete_file(f"{folder}/{name}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    add_scalars(folder, scalars_of_step)


def add_scalars(folder: str, scalars_of_step: Mapping[int, Mapping[str, float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with _local(folder) as local, SummaryWriter(local) as writer:
        for step, scalars in scalars_of_step.items():
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)


def add_picture(folder: str, tag: str, figure: "Figure", step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with _local(folder) as local, SummaryWriter(local) as writer:
        writer.add_figure(tag, figure, step)


def start_steps(folder: str) -> list[int]:
    """How many steps were finished at each start of the run whose events lie in `folder`, in the order of the starts.

    train/log_files.py begins a new file of events, and says so in it, whenever a run starts or is resumed.
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


@contextmanager
def _local(folder: str) -> Iterator[str]:
    """The folder itself; for a URL a temporary folder, whose files are uploaded at the end."""
    if not is_url(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        yield local
        for path in Path(local).iterdir():
            upload_file(path, f"{folder}/{path.name}")
