"""Where a run's values go: metrics.jsonl, TensorBoard's events, and Weights & Biases or trackio.

A full disk delays the files and never ends the run. TensorBoard also shows the recipe as text and as hparams, a layout
of its scalars, and pictures.
"""

import json
import logging
import math
import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import parse_json, read_file, redacted, write_text
from gmlp_scale.storage.growing_file import GrowingFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tensorboard.compat.proto.summary_pb2 import Summary

log = logging.getLogger(__name__)

LAYOUT = {
    "Training": {
        "loss": ["train/loss", "eval/loss"],
        "perplexity": ["train/perplexity", "eval/perplexity"],
        "gradient norm": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
    },
    "Speed": {
        "tokens per second": ["perf/tokens_per_second"],
        "share of the peak": ["perf/mfu"],
        "seconds per step": ["perf/step_seconds"],
        "waiting for data and checkpoints": ["perf/data_wait_fraction", "perf/checkpoint_stall_seconds"],
        "memory": ["memory/peak_gib"],
    },
}
"""Charts of the tab Custom Scalars: their tags, by category and title."""

PROJECT = "gmlp_scale"
"""Where WANDB_PROJECT is not set."""


class MetricsFile(GrowingFile):
    """metrics.jsonl, or another file with a JSON line for each step of some kind.

    The lines of steps after `start_step`, and a last line that a kill cut short, are taken out first.
    """

    def __init__(self, path: Path, start_step: float = math.inf):
        kept = [values for values in read_metrics(path) if values["step"] <= start_step]
        write_text(path, "".join(json.dumps(values) + "\n" for values in kept))
        self.of_start_step = [values for values in kept if values["step"] == start_step]
        """The lines of `start_step` that the file has already."""
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
        # TensorBoard reads the files in the order of their names, and the clock may have been set back meanwhile.
        earlier = re.findall(r"tfevents\.(\d+)\.", " ".join(os.listdir(directory)))
        self._began = max([int(time.time()), *(int(seconds) + 1 for seconds in earlier)])
        path = directory / f"events.out.tfevents.{self._began:010d}.{socket.gethostname()}.{os.getpid()}"
        path.touch()
        super().__init__(path)
        self._records = RecordWriter(self)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=start_step + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.add_summary(step, Summary(value=scalars))

    def add_summary(self, step: int, summary: "Summary") -> None:
        """Adds what is not a scalar: of `recipe_summaries` or `picture_summary`."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._add(Event(step=step, summary=summary))

    def _add(self, event) -> None:
        event.wall_time = max(time.time(), self._began)
        self._records.write(event.SerializeToString())


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, or of another file of a run with a JSON object for each step, at a path or URL.

    None without a file. A last line that a kill cut short is left out. InputError if a line is damaged, has no step, or
    has a tag, such as train/loss, that is no number.
    """
    metrics = []
    try:
        content = read_file(path)
    except FileNotFoundError:
        return metrics
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            match values := parse_json(line, f"{path}: line {number}"):
                case {"step": int(step)} if type(step) is int and 0 <= step < 2**63:
                    metrics.append(values)
                case _:
                    raise InputError(redacted(f"{path}: line {number} has no step: mend or remove it"))
            if wrong := [tag for tag, value in values.items() if "/" in tag and type(value) not in (int, float)]:
                raise InputError(redacted(f"{path}: line {number}: {wrong[0]} is no number: mend or remove it"))
    return metrics


class TrackerRun:
    """One of wandb or trackio for the whole run: a resumed run goes on with the one whose id is in its folder.

    The library's own variables say where the values go: WANDB_MODE=offline for a node without a network, WANDB_PROJECT,
    WANDB_API_KEY; TRACKIO_DIR, TRACKIO_SPACE_ID. Of what a resumed run adds again of steps after its checkpoint, W&B
    keeps the first values, and trackio both. What is refused later is logged once; training goes on without it.
    """

    def __init__(self, tracker: Literal["wandb", "trackio"], run_dir: Path, fields: dict[str, Any]):
        self._tracker, self._is_failing = tracker, False
        start = {"wandb": _start_wandb, "trackio": _start_trackio}[tracker]
        self._run = start(run_dir, fields, _own_id(run_dir / f"{tracker}_id"))

    def add(self, step: int, values: dict[str, float]) -> None:
        try:
            self._run.log(values, step=step)
        except Exception as error:  # its own process may be gone, in more than one way
            if not self._is_failing:
                refused = "%s refuses the values of step %d (%r). Training goes on without it"
                log.warning(refused, self._tracker, step, error)
            self._is_failing = True

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            log.warning("%s did not take the last values (%r); they are in metrics.jsonl", self._tracker, error)


def _start_wandb(run_dir: Path, fields: dict[str, Any], id: str):
    import wandb

    settings = wandb.setup().settings
    try:
        run = wandb.init(
            dir=run_dir,
            project=settings.project or PROJECT,
            name=fields["name"],
            id=id,
            resume="allow" if settings.mode == "online" else None,
            config=fields,
            # The command line, which W&B would store, may hold a password of a URL.
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, x_disable_meta=True
            ),
        )
    except wandb.Error as error:
        needed = "run `wandb login`, set WANDB_MODE=offline and sync later, or set train.tracker to null"
        raise InputError(f"train.tracker: found wandb, which refuses the run ({error}); {needed}") from error
    log.info("W&B: %s", run.dir if run.offline else run.url)
    return run


def _start_trackio(run_dir: Path, fields: dict[str, Any], id: str):
    import trackio

    try:  # it knows a run by its name
        return trackio.init(PROJECT, f"{fields['name']}-{id}", config=fields, resume="allow", embed=False)
    except (OSError, ValueError) as error:
        needed = "unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, run `hf auth login`, or set train.tracker to null"
        raise InputError(f"train.tracker: found trackio, which refuses the run ({error}); {needed}") from error


def _own_id(path: Path) -> str:
    if not path.exists():
        write_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def recipe_summaries(fields: dict[str, Any]) -> "list[Summary]":
    """The recipe's fields, by their names with dots, as text and as hparams; and the layout."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from torch.utils.tensorboard.summary import custom_scalars, text

    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    rows = "\n".join(f"| {name} | `{value}` |" for name, value in texts.items())
    # TensorBoard takes numbers, booleans and texts.
    hparams = {name: value if isinstance(value, bool | int | float) else texts[name] for name, value in fields.items()}
    charts = {
        category: {title: ("Multiline", [f"^{tag}$" for tag in tags]) for title, tags in titles.items()}
        for category, titles in LAYOUT.items()
    }
    return [
        text("config", f"| field | value |\n| --- | --- |\n{rows}"),
        hparams_pb(hparams, trial_id=fields["name"]),
        custom_scalars(charts),
    ]


def picture_summary(tag: str, figure: "Figure") -> "Summary":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from torch.utils.tensorboard.summary import image

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return image(tag, np.asarray(canvas.buffer_rgba()), dataformats="HWC")
