"""The table of faults, ours beside the plain parts'. `make faults` prints it into docs/faults.md."""

import datetime
import os
from collections import Counter
from collections.abc import Callable, Iterable

import torch

OURS = "gmlp_scale"
ROWS = (
    "SIGKILL of a random rank at a random step",
    "memory: killed by the kernel for lack of it",
    "killed within a save",
    "a checkpoint's bit flipped, byte zeroed, file cut or longer",
    "full disk during a save",
    "full disk during logs, cache and data jobs",
    "a run's folder, log or place for checkpoints that is gone or no folder",
    "a pipe or device where a file of a run is read",
    "fsync of 5 s under asynchronous saves",
    "world size 2 to 1 to 4, other micro-batch",
    "resume in a later epoch, at an epoch's end, 100 batches on",
    "a shard's bit flipped, byte zeroed, file cut or longer",
    "shards missing, empty, of wrong count, listed twice or out of order",
    "NaN, Inf or a 10,000-fold loss in one rank's batch",
    "a data error on one rank",
    "SIGSTOP or end of a rank",
    "SIGSTOP of a rank under a launcher",
    "SIGTERM, SIGUSR1 or SIGINT to a rank",
    "SIGTERM to a launcher",
    "stop signals that keep coming until the process is gone",
    "data job killed, its processes or its own",
    "finetuning sweep killed at a file operation",
    "a push to the Hub that fails in the middle",
    "S3: 10 % of answers 503, reset, cut or late",
    "S3: 403 and 404",
    "a store that lists new files late",
    "corpus files cut or damaged",
    "an export's file damaged",
    "pickles where a file is read",
    "tar members with ../, links, devices, pickles; right checksums",
    "pipe: URLs",
    "gz and zst that unpack to far more than memory",
    "YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9",
    "secrets in URLs and environment",
    "other data, tokenizer, seed or model on resume",
    "two jobs on one folder",
    "soak of 10,000 steps, a fault about every 200",
    "starts of each engine end cleanly",
)


class Trials:
    """What a test's fixture `trials` is: call it once the trials of a row are over."""

    def __init__(self, record: Callable[[str, object], None]):
        self._record = record

    def __call__(self, row: str, num_trials: int, lost: int = 0, *, part: str = OURS, note: str = "") -> None:
        """`lost` of the trials ended silently wrong or with what was good before gone; the others are found."""
        assert row in ROWS and 0 <= lost <= num_trials, (row, num_trials, lost)
        self._record("trials", [row, part, num_trials, lost, note])


def table(records: Iterable[list]) -> str:
    """Markdown: a line for each row, with ours and then each plain part, and below it the notes."""
    counts: dict[tuple[str, str], Counter] = {}
    notes: dict[str, None] = {}
    for row, part, num_trials, lost, note in records:
        counts.setdefault((row, part), Counter()).update(trials=num_trials, lost=lost)
        if note:
            notes[f"- {row}, {part}: {note}."] = None
    lines = ["| fault | trials | found | lost | the same on plain parts |", "|---|---|---|---|---|"]
    for row in ROWS:
        ours = counts.get((row, OURS), Counter())
        plain = [
            f"{part}: {count['lost']} of {count['trials']} lost"
            for (other, part), count in counts.items()
            if other == row and part != OURS
        ]
        cells = [row, ours["trials"], ours["trials"] - ours["lost"], ours["lost"], "; ".join(plain) or "-"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    total = sum((count for (_, part), count in counts.items() if part == OURS), Counter())
    lines.append(f"| all | {total['trials']} | {total['trials'] - total['lost']} | {total['lost']} | |")
    return "\n".join([*lines, "", *sorted(notes)])


def document(records: Iterable[list], seconds: float) -> str:
    """docs/faults.md."""
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU"
    return f"{_HEAD}\n{datetime.date.today()}, {where}, {seconds / 60:.1f} minutes.\n\n{table(records)}\n"


_HEAD = """\
# Faults that were injected, and what came of them

`make faults` injects them and writes this file. A trial is one fault met by one run, job or reader. A fault is found if
it was reported, or if the result is that of the undisturbed run, bit for bit where the row is about training. A fault
is lost if the result is silently wrong, or if what was good before is gone. Damage to something that a part does not
read counts nowhere.

These are real: the processes, the signals (also the kernel's own kill for lack of memory, where the user may make a
memory cgroup), the files, the limits on file sizes, the launchers `torchrun` and `deepspeed`, and S3's protocol, spoken
by moto's server behind a proxy that fails. There was no object store of a provider, no NFS, no second machine, no GPU
and no power cut (a killed process leaves what the kernel has). Seeds are fixed.

The plain parts are used as their documentation shows them: torch.save, safetensors and torch.distributed.checkpoint
(DCP) save into the same place again, DeepSpeed's save_checkpoint under a new tag, webdataset with its default error
handler. Each saves the same three small tensors. In "killed within a save" and "full disk" the kernel ends the second
save at a byte of a file (SIGXFSZ, or write() fails), at ten places over the file's size; ours is killed by SIGKILL at
every event of a save besides. DCP in a new folder for each save would have kept the one before.

Times stand below the table and are not judged, since other work on the machine changes them.
"""
