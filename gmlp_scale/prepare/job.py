"""A tokenizing job's options, and what the jobs of text and of images share: their folder and their workers.

The folder has the job's settings, its finished tasks, their counts and refused records.

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

import errno
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing import parent_process
from multiprocessing.context import BaseContext
from pathlib import Path

from gmlp_scale.data.batch import SpecialIds
from gmlp_scale.data.json_tokenizer import AnyTokenizer, JsonTokenizer
from gmlp_scale.data.shards import row_dtype
from gmlp_scale.errors import InputError, UserError
from gmlp_scale.prepare.input_files import InputFile, find_inputs
from gmlp_scale.prepare.read_records import FileReader
from gmlp_scale.storage.claim import hold_folder, json_names
from gmlp_scale.storage.damage import damage_as
from gmlp_scale.storage.files import is_local, open_filesystem, read_json_if_there, redacted, with_retries, write_text


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
        filesystem, path = open_filesystem(self.output)

        def is_foreign() -> bool:
            if not filesystem.exists(path) or filesystem.exists(f"{path.rstrip('/')}/job"):
                return False
            return not filesystem.isdir(path) or bool(filesystem.ls(path))

        if with_retries(is_foreign, f"looking into {self.output}"):
            raise InputError(
                f"--output {self.output} is there and is not the output of a job like this: choose another"
            )
        try:
            with hold_folder(self.output, f"{self.url}/claims"):
                self._record(json.loads(json.dumps(redacted(settings))))
                yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                place = error.filename or redacted(self.output)
                raise UserError(
                    f"{place} cannot be written ({error.strerror}): make room there; the same command again goes on "
                    "with what is not done"
                ) from error
            raise

    def _record(self, settings: dict) -> None:
        known = self.read("job.json")
        if known is None:
            self.write("job.json", settings)
        elif known != settings:
            pairs = [(name, known.get(name), settings.get(name)) for name in known | settings]
            changes = "; ".join(_change(*pair) for pair in pairs if pair[1] != pair[2])
            raise InputError(
                f"--output {self.output} holds a job with other settings ({changes}): give another --output, or "
                "the old settings and inputs to go on with that job"
            )

    def remove_leftovers(self) -> None:
        """Removes the half-written files of killed processes. Only on disks are there any."""
        if is_local(self.output):
            folder = Path(self.output.removeprefix("file://"))
            for path in (*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")):
                path.unlink()

    def write(self, name: str, content: object) -> None:
        write_text(f"{self.url}/{name}", json.dumps(redacted(content), indent=1) + "\n")

    def read(self, name: str) -> dict | None:
        return read_json_if_there(f"{self.url}/{name}")

    def read_all(self, folder: str, prefix: str = "") -> list[dict]:
        """The JSON files of a folder whose names begin with `prefix`, in the order of their names."""
        names = json_names(f"{self.url}/{folder}")
        return [self.read(f"{folder}/{name}") for name in names if name.startswith(prefix)]

    def total_counts(self, step: str) -> Counter:
        """What a pipeline step counted, summed over the tasks."""
        return sum(map(Counter, self.read_all("counts", f"{step}-")), Counter())


def _change(name: str, before: object, now: object) -> str:
    """What has changed, in words; of files, [name, bytes] each, the first that differs."""
    if (
        name not in ("inputs", "decontaminate")
        or not before
        or not now
        or not all(isinstance(item, list) for item in before + now)
    ):
        before, now = (text if len(text := json.dumps(value)) <= 80 else f"{text[:77]}..." for value in (before, now))
        return f"{name} was {before}, is {now}"
    before, now = dict(before), dict(now)
    for file in {**before, **now}:
        if file not in now:
            return f"{file} is no longer in {name}"
        if file not in before:
            return f"{file} is new in {name}"
        if before[file] != now[file]:
            return f"{file} had {before[file]:,} bytes, has {now[file]:,}"
    return "the inputs are in another order"


@dataclass(frozen=True, repr=False)  # datatrove logs the steps of a task as Python shows them: no passwords of URLs
class JobOptions:
    """The options of data_prep/tokenize_corpus.py, whose --help explains each. InputError names the first wrong one."""

    input: tuple[str, ...]
    tokenizer: str
    sequence_length: int
    output: str
    end_token: str | None = None
    heldout_fraction: float = 0.005
    packing: str = "packed"
    dedup: tuple[str, ...] = ()
    decontaminate: tuple[str, ...] = ()
    text_field: str = "text"
    tasks: int | None = None
    workers: int = 1
    executor: str = "local"
    slurm_partition: str | None = None
    slurm_time: str = "12:00:00"
    shard_bytes: int = 8 << 20
    max_record_bytes: int = 4_000_000
    max_bad_fraction: float = 0.01
    max_bad_files: int = 0
    dry_run: bool = False

    def __post_init__(self):
        for name, lowest, highest in (
            ("sequence_length", 4, 1 << 16),
            ("heldout_fraction", 0, 0.999),
            ("max_bad_fraction", 0, 1),
            ("max_bad_files", 0, 1 << 31),
            ("tasks", 1, 1 << 31),
            ("workers", 1, 1 << 16),
            ("shard_bytes", 2 * self.sequence_length, 1 << 31),
            ("max_record_bytes", 1, 1 << 31),
        ):
            if (found := getattr(self, name)) is not None and not lowest <= found <= highest:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} is {found}; it must be between {lowest} and {highest}")
        if (self.executor == "slurm") != (self.slurm_partition is not None):
            raise InputError("--executor slurm and --slurm-partition go together: give both or neither")
        if self.executor == "slurm" and redacted(sources := [*self.input, *self.decontaminate, self.output]) != sources:
            raise InputError(
                "--executor slurm keeps the job's options in a file, and a URL among them holds a password or a "
                "signature: leave it out and give the store's key in the environment"
            )
        for source in filter(_is_hub_data_set, self.input):
            if len(self.input) > 1:
                raise InputError("--input hf:NAME:CONFIG:SPLIT must be the only source of a job")
            if source.count(":") != 3:
                raise InputError(f"--input {source} is not of the form hf:NAME:CONFIG:SPLIT, as hf:allenai/c4:en:train")

    @cached_property
    def job(self) -> JobFolder:
        return JobFolder(self.output)

    @property
    def hub_data_set(self) -> tuple[str, str, str] | None:
        """Name, config and split where the input is a data set of the Hugging Face hub."""
        return tuple(self.input[0].split(":")[1:]) if _is_hub_data_set(self.input[0]) else None

    @cached_property
    def files(self) -> list[InputFile]:
        """The input files; none for a data set of the hub. InputError where a source matches nothing readable."""
        return [] if self.hub_data_set else find_inputs(self.input)

    @cached_property
    def files_to_avoid(self) -> list[InputFile]:
        """The files of --decontaminate. InputError where a source matches nothing readable."""
        return find_inputs(self.decontaminate, "--decontaminate")

    @cached_property
    def num_tasks(self) -> int:
        """Unless given, one for each file; for a data set of the hub as many as it has files."""
        return self.tasks or (self.hub_stream().num_shards if self.hub_data_set else len(self.files))

    def rows_per_shard(self, vocab_size: int) -> int:
        return max(1, self.shard_bytes // (self.sequence_length * row_dtype(vocab_size).itemsize))

    def special_ids(self, tokenizer: AnyTokenizer) -> SpecialIds:
        """InputError where documents have no end token, or nothing to be padded with."""
        special = tokenizer.special_ids(self.end_token)
        if self.packing == "document" and special.pad is None:
            raise InputError(f"--packing document pads rows, and {self.tokenizer} has no pad token: use packed")
        return special

    def hub_stream(self):
        """The data set of the hub as a datasets.IterableDataset."""
        from datasets import load_dataset

        name, config, split = self.hub_data_set
        with damage_as(lambda found: InputError(f"--input {self.input[0]}: {found}")):  # or no such config or split
            return load_dataset(name, config, split=split, streaming=True)

    def settings(self, tokenizer: AnyTokenizer) -> dict:
        """Everything that the output's bytes depend on."""
        names = (
            "sequence_length", "heldout_fraction", "packing", "text_field", "shard_bytes", "max_record_bytes",
            "dedup",
        )  # fmt: skip
        settings = {name: getattr(self, name) for name in names} | {
            "tasks": self.num_tasks,
            "tokenizer_sha256": tokenizer.sha256,
            "inputs": [[file.url, file.num_bytes] for file in self.files] or self.input,
            "decontaminate": [[file.url, file.num_bytes] for file in self.files_to_avoid],
        }
        special = self.special_ids(tokenizer)
        return settings | ({"special_ids": asdict(special)} if isinstance(tokenizer, JsonTokenizer) else {})

    def reader(self, file: InputFile, part: int = 0, num_parts: int = 1) -> FileReader:
        return FileReader(
            file, text_field=self.text_field, max_record_bytes=self.max_record_bytes, part=part, num_parts=num_parts
        )


def _is_hub_data_set(source: str) -> bool:
    return source.startswith("hf:") and not source.startswith("hf://")  # a path on the hub is a file like others


@contextmanager
def pool_of_workers(num_workers: int, context: BaseContext) -> Iterator[ProcessPoolExecutor]:
    """multiprocessing's own pool waits for ever when a worker is killed; this one raises UserError in the body.

    The workers end when the job's own process does, so a killed job leaves nothing running.
    """
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, perhaps for want of memory (try fewer --workers); the same command again goes on "
            "with what is not done"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Print nothing, since the task's log and the error that the job prints say it all; end when the job ends."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def watch():
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
