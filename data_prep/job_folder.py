"""The job folder inside an output folder: what was asked for, which tasks are done, what they counted and refused.

OUTPUT/job/job.json                 the settings and inputs; another job cannot continue here
OUTPUT/job/running.json             host and process of the job that runs now
OUTPUT/job/executor/                datatrove's logs and completion marks
OUTPUT/job/counts/STEP-00003.json   what a step of a task counted
OUTPUT/job/receipts/00003.json      the shards that a task wrote
OUTPUT/job/quarantine/00003.jsonl   records that a task could not read, with file and line
OUTPUT/job/progress/00003.json      how far a running task is
"""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec

from gmlp_scale.data.files import read_file, with_retries, write_file


class JobError(ValueError):
    """A job that cannot start or end as asked, in words for its user."""


class JobFolder:
    """The job folder of `output`, a path or a URL that fsspec opens."""

    def __init__(self, output: str):
        self.output = output
        self.url = f"{output.rstrip('/')}/job"

    def begin(self, settings: dict) -> None:
        """Record the settings, or see that they are those of the job that began here. Raises JobError."""
        settings = json.loads(json.dumps(settings))
        known = self.read("job.json")
        if known is None:
            filesystem, path = fsspec.url_to_fs(self.output)
            if filesystem.exists(path) and (not filesystem.isdir(path) or filesystem.ls(path)):
                raise JobError(
                    f"--output {self.output} is there and is not the output of a job like this: choose another"
                )
            self.write("job.json", settings)
        elif known != settings:
            names = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
            changes = "; ".join(
                f"{name} was {_brief(known.get(name))}, is {_brief(settings.get(name))}" for name in names
            )
            raise JobError(
                f"--output {self.output} holds a job with other settings ({changes}): choose another folder, or "
                "give the old settings to go on with that job"
            )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the folder for this process. Raises JobError naming the process that holds it already."""
        mine = {"host": socket.gethostname(), "process": os.getpid()}
        holder = self.read("running.json")
        if holder and not _is_gone(holder):
            raise JobError(
                f"another job writes to {self.output}: process {holder['process']} on {holder['host']}. Wait for it; "
                f"if it is gone, delete {self.url}/running.json"
            )
        self.write("running.json", mine)
        try:
            yield
        finally:
            filesystem, path = fsspec.url_to_fs(f"{self.url}/running.json")
            with suppress(FileNotFoundError):
                filesystem.rm_file(path)

    def write(self, name: str, content: object) -> None:
        write_file(f"{self.url}/{name}", (json.dumps(content, indent=1) + "\n").encode())

    def read(self, name: str) -> dict | None:
        try:
            return json.loads(read_file(f"{self.url}/{name}"))
        except FileNotFoundError:
            return None

    def read_all(self, folder: str, prefix: str = "") -> list[dict]:
        """The JSON files of a folder whose names begin with `prefix`, in the order of their names."""
        filesystem, path = fsspec.url_to_fs(f"{self.url}/{folder}")
        filesystem.invalidate_cache()
        try:
            paths = with_retries(lambda: filesystem.ls(path, detail=False), f"listing {self.url}/{folder}")
        except FileNotFoundError:
            return []
        names = sorted(path.rsplit("/", 1)[-1] for path in paths)
        return [self.read(f"{folder}/{name}") for name in names if name.startswith(prefix) and not name.startswith(".")]

    def total_counts(self, step: str) -> Counter:
        """The sums over the tasks of what a step counted."""
        total = Counter()
        for counts in self.read_all("counts", f"{step}-"):
            total.update(counts)
        return total


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_gone(holder: dict) -> bool:
    """Whether the process was on this machine and has ended."""
    if holder["host"] != socket.gethostname():
        return False
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
