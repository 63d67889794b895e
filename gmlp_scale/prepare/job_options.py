"""The options of a tokenizing job, checked, and what follows from them."""

from dataclasses import dataclass
from functools import cached_property

from gmlp_scale.data.shards import ROW_DTYPE
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import FileReader, InputFile, find_inputs
from gmlp_scale.prepare.job_folder import JobFolder
from gmlp_scale.storage.files import redacted


@dataclass(frozen=True)
class JobOptions:
    """The options of data_prep/tokenize_corpus.py, whose --help explains each. InputError names the first wrong one."""

    input: tuple[str, ...]
    tokenizer: str
    sequence_length: int
    output: str
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
            ("workers", 1, 1 << 16),
            ("shard_bytes", 2 * self.sequence_length, 1 << 31),
            ("max_record_bytes", 1, 1 << 31),
        ):
            if not lowest <= (found := getattr(self, name)) <= highest:
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} is {found}; it must be between {lowest} and {highest}")
        if self.tasks is not None and self.tasks < 1:
            raise InputError(f"--tasks is {self.tasks}; it must be at least 1")
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
    def num_tasks(self) -> int:
        """Unless given, one for each file; for a data set of the hub as many as it has files."""
        return self.tasks or (self.hub_stream().num_shards if self.hub_data_set else len(self.files))

    @property
    def rows_per_shard(self) -> int:
        return max(1, self.shard_bytes // (self.sequence_length * ROW_DTYPE.itemsize))

    def hub_stream(self):
        """The data set of the hub as a datasets.IterableDataset."""
        from datasets import load_dataset

        name, config, split = self.hub_data_set
        try:
            return load_dataset(name, config, split=split, streaming=True)
        except ValueError as error:  # no such config or split, and which there are
            raise InputError(f"--input hf:{name}:{config}:{split}: {error}") from error

    @property
    def filters(self) -> list[str]:
        """The names of the job's filters, in their order."""
        return [*(["decontaminate"] if self.decontaminate else []), *self.dedup]

    def settings(self, tokenizer: Tokenizer) -> dict:
        """Everything that the output's bytes depend on."""
        names = (
            "sequence_length", "heldout_fraction", "packing", "text_field", "shard_bytes", "max_record_bytes",
            "dedup", "decontaminate",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "tasks": self.num_tasks,
            "tokenizer_sha256": tokenizer.sha256,
            "inputs": [[file.url, file.num_bytes] for file in self.files] or self.input,
        }

    def reader(self, file: InputFile, part: int = 0, num_parts: int = 1) -> FileReader:
        return FileReader(
            file, text_field=self.text_field, max_record_bytes=self.max_record_bytes, part=part, num_parts=num_parts
        )


def _is_hub_data_set(source: str) -> bool:
    return source.startswith("hf:") and not source.startswith("hf://")  # a path on the hub is a file like others
