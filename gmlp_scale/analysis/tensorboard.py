"""Scalars and pictures beside a run's own TensorBoard files.

They go into subfolders, which TensorBoard shows as runs of their own: in the run's folder a second writer would end the
reading of the first one's file, and a resume would purge what it wrote.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def replace_scalars(folder: Path, scalars_of_step: Mapping[int, Mapping[str, float]]) -> None:
    """Makes `folder` hold these scalars and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    add_scalars(folder, scalars_of_step)


def add_scalars(folder: Path, scalars_of_step: Mapping[int, Mapping[str, float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for step, scalars in scalars_of_step.items():
            for tag, value in scalars.items():
                writer.add_scalar(tag, value, step)


def add_picture(folder: Path, tag: str, figure: "Figure", step: int) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        writer.add_figure(tag, figure, step)
