"""Writes scalars and pictures beside a run's own TensorBoard files.

They go into subfolders, which TensorBoard shows as separate runs. In the run's own folder, TensorBoard would stop
reading the run's file once a second one appears, and a resume would delete the added points.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def replace_scalars(folder: Path, scalars_of_step: Mapping[int, Mapping[str, float]]) -> None:
    """Writes these scalars to `folder` and deletes what was there."""
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
