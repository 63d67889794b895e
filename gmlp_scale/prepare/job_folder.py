"""The job folder inside an output folder: the job's settings, its finished tasks, their counts and refused records.

OUTPUT/job/job.json                 the settings and inputs; another job cannot continue here
OUTPUT/job/claims/000001.json       host and process of each job that ran here, one at a time
OUTPUT/job/slurm.json               the last job that was submitted to Slurm
OUTPUT/job/executor-PASS/           datatrove's logs and completion marks
OUTPUT/job/counts/STEP-00003.json   what a step of a task counted
OUTPUT/job/receipts/00003.json      the shards that a task wrote
OUTPUT/job/quarantine/00003.jsonl   records that a task could not read, with file and line
OUTPUT/job/bad_files/00003.json     broken files that a task met, with the bytes read and lost
OUTPUT/job/progress-PASS/00003.json how far a running task is
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gmlp_scale.errors import InputError
from gmlp_scale.storage.claim import hold_folder, json_names
from gmlp_scale.storage.files import open_filesystem, read_file, redacted, with_retries, write_text


class JobFolder:
    """The job folder of `output`, a path or a URL that fsspec opens."""

    def __init__(self, output: str):
        self.output = output
        self.url = f"{output.rstrip('/')}/job"

    @contextmanager
    def begun(self, settings: dict) -> Iterator[None]:
        """Record the settings and hold the folder for this process while the body runs.

        Raises InputError where a job with other settings began here, ClaimedError where another job holds the folder.
        """
        if self._is_foreign():
            raise InputError(
                f"--output {self.output} is there and is not the output of a job like this: choose another"
            )
        with hold_folder(self.output, f"{self.url}/claims"):
            self._record(json.loads(json.dumps(redacted(settings))))
            yield

    def _is_foreign(self) -> bool:
        """Whether the output folder is there but is not a job's."""
        filesystem, path = open_filesystem(self.output)

        def look() -> bool:
            if not filesystem.exists(path) or filesystem.exists(f"{path.rstrip('/')}/job"):
                return False
            return not filesystem.isdir(path) or bool(filesystem.ls(path))

        return with_retries(look, f"looking into {self.output}")

    def _record(self, settings: dict) -> None:
        known = self.read("job.json")
        if known is None:
            self.write("job.json", settings)
        elif known != settings:
            pairs = {name: (known.get(name), settings.get(name)) for name in {**known, **settings}}
            changes = "; ".join(_change(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1])
            raise InputError(
                f"--output {self.output} holds a job with other settings ({changes}): give another --output, or "
                "the old settings and inputs to go on with that job"
            )

    def write(self, name: str, content: object) -> None:
        write_text(f"{self.url}/{name}", json.dumps(redacted(content), indent=1) + "\n")

    def read(self, name: str) -> dict | None:
        try:
            return json.loads(read_file(f"{self.url}/{name}"))
        except FileNotFoundError:
            return None

    def read_all(self, folder: str, prefix: str = "") -> list[dict]:
        """The JSON files of a folder whose names begin with `prefix`, in the order of their names."""
        names = json_names(f"{self.url}/{folder}")
        return [self.read(f"{folder}/{name}") for name in names if name.startswith(prefix)]

    def total_counts(self, step: str) -> Counter:
        """What a pipeline step counted, summed over the tasks."""
        return sum(map(Counter, self.read_all("counts", f"{step}-")), Counter())


def _change(name: str, before: object, now: object) -> str:
    """What has changed, in words; of the input files, [name, bytes] each, the first that differs."""
    if name != "inputs" or not before or not now or not all(isinstance(item, list) for item in before + now):
        before, now = (text if len(text := json.dumps(value)) <= 80 else f"{text[:77]}..." for value in (before, now))
        return f"{name} was {before}, is {now}"
    before, now = dict(before), dict(now)
    for file in {**before, **now}:
        if file not in now:
            return f"{file} is no longer an input"
        if file not in before:
            return f"{file} is a new input"
        if before[file] != now[file]:
            return f"{file} had {before[file]:,} bytes, has {now[file]:,}"
    return "the inputs are in another order"
