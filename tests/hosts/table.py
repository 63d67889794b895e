"""The table of docs/many-nodes.md: what `make hosts` tried and found."""

import datetime
import os
import re

import torch

from tests.hosts.hosts import ROOT

ROWS = (
    "losses of one process, within 1e-5: torchrun",
    "losses of one process, within 1e-5: deepspeed over pdsh and ssh",
    "losses of one process, within 1e-5: sbatch",
    "a host's processes killed",
    "link cut for 5 s",
    "link cut for good",
    "SIGSTOP of a rank",
    "SIGTERM to a rank",
    "SIGTERM to an agent or launcher",
    "Slurm's signals",
    "requeued by Slurm",
    "Slurm's elastic form",
    "two jobs on the same hosts",
    "elastic: hosts killed and back again",
    "elastic: SIGTERM to one of 4 launchers",
)


def table(records: list[list]) -> str:
    """Markdown: a line for each row, with what its trials showed."""
    lines = ["| tried | trials | as it should | lost | seen |", "|---|---|---|---|---|"]
    for row in ROWS:
        of_row = [(lost, shown) for other, lost, shown in records if other == row]
        if not of_row:
            lines.append(f"| {row} | 0 | | | not tried in this run |")
            continue
        lost = sum(lost for lost, _ in of_row)
        lines.append(f"| {row} | {len(of_row)} | {len(of_row) - lost} | {lost} | {'; '.join(s for _, s in of_row)} |")
    return "\n".join(lines)


def document(records: list[list], seconds: float) -> str:
    """The page, with this run in place of the one that it shows."""
    text = (ROOT / "docs/many-nodes.md").read_text()
    head, _ = re.split(r"^(?=\d{4}-\d\d-\d\d, )", text, maxsplit=1, flags=re.MULTILINE)
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU"
    return f"{head}{datetime.date.today()}, {where}, {seconds / 60:.1f} minutes.\n\n{table(records)}\n"
