"""docs/many-nodes.md: how to start a run on several hosts, and what `make hosts` tried and found."""

import datetime
import os
from collections.abc import Iterable

import torch

ROWS = (
    "losses of one process, within 1e-5: torchrun",
    "losses of one process, within 1e-5: deepspeed over pdsh and ssh",
    "losses of one process, within 1e-5: sbatch",
)


def table(records: Iterable[list]) -> str:
    """Markdown: a line for each row, with what its trials showed."""
    trials: dict[str, list[tuple[int, str]]] = {row: [] for row in ROWS}
    for row, lost, shown in records:
        trials[row].append((lost, shown))
    lines = ["| tried | trials | as it should | lost | seen |", "|---|---|---|---|---|"]
    for row, of_row in trials.items():
        lost = sum(lost for lost, _ in of_row)
        lines.append(f"| {row} | {len(of_row)} | {len(of_row) - lost} | {lost} | {'; '.join(s for _, s in of_row)} |")
    return "\n".join(lines)


def document(records: Iterable[list], seconds: float) -> str:
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU"
    return f"{_HEAD}\n{datetime.date.today()}, {where}, {seconds / 60:.1f} minutes.\n\n{table(records)}\n"


_HEAD = ""
