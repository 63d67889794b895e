"""Writes scalars and pictures beside a run's own TensorBoard files.

They go into subfolders, which TensorBoard shows as separate runs. In the run's own folder, TensorBoard would stop
reading the run's file once a second one appears, and a resume would delete the added points.

A folder is a path or a URL.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gmlp_scale.files import delete_file, is_url, list_files, upload_file

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


@contextmanager
def _local(folder: str) -> Iterator[str]:
    """The folder; for a URL one whose files go there at the end."""
    if not is_url(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        yield local
        for path in Path(local).iterdir():
            upload_file(path, f"{folder}/{path.name}")
