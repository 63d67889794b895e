"""Portable checkpoints: written by any engine at any world size, read by any other.

    checkpoints/step_000012000/rank_00000_000.safetensors   rank 0's pieces, in float32
                               rank_00000_001.safetensors   a new file about every FILE_BYTES
                               rank_00001_000.safetensors   ...
                               DONE                         JSON: where each tensor's pieces lie, each file's bytes and
                                                            checksum, step, details, its own checksum (class `_Done`)

A piece is a slice of a tensor along dimension 0 or, as ZeRO cuts parameters anywhere, some elements of the flattened
tensor. The second kind is new in format 4; in DONE its tensors have "by_elements": true.

Keys are model.<name>, and optimizer.<name>.exp_avg and .exp_avg_sq where AdamW updates the parameter, or .momentum
where Muon does. Only safetensors and JSON are read: nothing is ever unpickled. A save has these steps; those in the
background need no collective:

 1. `save` copies this rank's pieces to staging buffers on the calling thread; training goes on.
 2. Background threads of each rank hash, write and fsync its files in step_000012000.tmp-<token of the run>-<attempt>.
 3. They then send rank 0 through the launcher's key-value store which piece lies in which file, or what error stopped
    them. That needs neither room on the disk nor a listing of the folder, which NFS may give 30 s late.
 4. Rank 0's thread waits for all of them, checks that the pieces cover each tensor once, writes and fsyncs DONE,
 5. renames the folder to step_000012000 and fsyncs the parent,
 6. deletes all but the newest `keep_last` checkpoints and those of `keep_every_steps`, renaming each to a temporary
    name first,
 7. and sends the other ranks whether to begin again at 2, since the disk refused what one of them wrote.

A kill before 5 or during 6 leaves a temporary folder, which the next run on this folder removes. The rename is the only
commit, and POSIX makes it atomic: a folder with a checkpoint's name is always whole. That is why DONE comes before it.
A run folder at a URL has no rename: gmlp_scale/checkpoint/stores.py says what takes the place of 4 to 6.
We do not trust the filesystem either: before a tensor is used, every file that DONE names must have its checksum.
"""

import difflib
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError, field_validator
from safetensors import safe_open
from torch import Tensor, nn

from gmlp_scale.checkpoint.pieces import PIECE_FILE, FileRecord, TensorRecord, file_problem, num_units
from gmlp_scale.engine import Engine
from gmlp_scale.engine.masters import model_key
from gmlp_scale.errors import UserError, validation_problems
from gmlp_scale.storage.files import check_seal, read_file

STEP_FOLDER = re.compile(r"step_\d{9}")
FORMAT_VERSION = 4
"""Counts changes of the files, and of the rows and masks that a resumed run would go on with. Version 3 had no pieces
by elements, and its readers would take a checkpoint with them for damaged. In version 2 the index named every piece;
version 1 had other checksums and other masks."""
READABLE_VERSIONS = (2, 3, FORMAT_VERSION)


class CheckpointError(UserError):
    """A checkpoint cannot be written or read."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has another FORMAT_VERSION. It may well be whole."""


class _Config(BaseModel, frozen=True, extra="allow"):
    train: dict[str, Any]
    optimizer: dict[str, Any]


class _Details(BaseModel, frozen=True, extra="allow"):
    """What the code behind relies on in the details of a run of any task."""

    config: _Config
    data: dict[str, Any] = Field(min_length=1)
    time_budget: dict[str, Any] = {}


class _Done(BaseModel, frozen=True, extra="forbid"):
    format_version: int
    step: int
    details: dict[str, Any]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    recent_losses: list[Any] = []
    """Of a DONE written before these became a part of the details."""
    xxh3_128: str
    """The checksum of DONE's text without this field."""

    @field_validator("details")
    @classmethod
    def _check_details(cls, details: dict[str, Any]) -> dict[str, Any]:
        _Details.model_validate(details)
        return details


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, verified when it was opened."""

    path: Path
    step: int
    details: dict[str, Any]
    tensors: dict[str, TensorRecord] = field(repr=False)
    _files: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path, verify_files: bool = True) -> "Checkpoint":
        """Reads DONE and, unless rank 0 did, checks all files against it. CheckpointError names what is wrong."""
        done = read_done(path)
        if verify_files:
            _verify_files(path, done)
        details = {"guard": {"recent_losses": done.recent_losses}} | done.details
        return cls(path, done.step, details, done.tensors)

    @property
    def provenance(self) -> dict[str, Any]:
        """What an export says of the weights: the step and the details that are no state of a running job."""
        kept = {name: self.details[name] for name in ("config", "data", "time_budget") if name in self.details}
        return {"step": self.step, **kept}

    @property
    def keys(self) -> list[str]:
        return list(self.tensors)

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's parameters, by name."""
        prefix = model_key("")
        return {key.removeprefix(prefix): of.shape for key, of in self.tensors.items() if key.startswith(prefix)}

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.parameters.values()))

    def read(self, key: str, first: int = 0, stop: int | None = None) -> Tensor:
        """Indices [first, stop) along dimension 0, float32 on the CPU, as a copy; a 0-d tensor is read whole.

        Raises CheckpointError for an unknown key, and for indices that the tensor does not have.
        """
        if key not in self.tensors:
            near = difflib.get_close_matches(key, self.tensors, n=3)
            raise CheckpointError(f"{self.path} has no {key!r} among {len(self.tensors)} tensors; nearest: {near}")
        record = self.tensors[key]
        length = num_units(record.shape, by_elements=False)
        stop = length if stop is None else stop
        if not 0 <= first <= stop <= length:
            raise CheckpointError(f"{self.path} has {key!r} of shape {record.shape}, not its indices {first} to {stop}")
        shape = (stop - first, *record.shape[1:]) if record.shape else ()
        tensor = values = torch.empty(shape, dtype=torch.float32, device="cpu")
        if record.by_elements:
            size, values = math.prod(record.shape[1:]), tensor.view(-1)
            first, stop = first * size, stop * size
        for file, piece_first, count in record.pieces_between(first, stop):
            if not values.ndim:
                tensor.copy_(self._file(file).get_tensor(key))
            else:
                low, high = max(first, piece_first), min(stop, piece_first + count)
                piece = self._file(file).get_slice(key)
                values[low - first : high - first] = piece[low - piece_first : high - piece_first]
        return tensor

    def misfit(self, model: nn.Module) -> str:
        """Which of the model's parameters have other names or shapes here; empty if all fit."""
        saved = self.parameters
        own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return f"parameters: {difference(own, saved)}" if saved != own else ""

    def load_into(self, engine: Engine) -> None:
        engine.load_state(self.read, self.step)

    def _file(self, name: str):
        if name not in self._files:
            self._files[name] = safe_open(self.path / name, "pt")  # a memory map without a descriptor: all stay open
        return self._files[name]


def read_done(path: Path) -> _Done:
    """The DONE of a checkpoint's folder. CheckpointError if there is none, or if it is damaged or of another step."""
    try:
        text = read_file(path / "DONE").decode("ascii")
        check_seal(text)  # first, so that a damaged version number is not taken for another version
        _check_version(path, text)
        done = _Done.model_validate_json(text)
        if path.name != folder_name(done.step):
            raise ValueError(f"it is of step {done.step}")
        if not all(PIECE_FILE.fullmatch(name) for name in done.files):
            raise ValueError(f"it names files that no checkpoint has: {list(done.files)}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} has no DONE") from error
    except ValidationError as error:
        raise CheckpointError(f"{path.name}: DONE cannot be used: {validation_problems(error)}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: DONE cannot be used: {error}") from error
    return done


def _check_version(path: Path, text: str) -> None:
    found = re.match(r'{"format_version": (\d+),', text)
    if found and int(found[1]) not in READABLE_VERSIONS:
        raise CheckpointVersionError(
            f"{path} is a checkpoint of format {found[1]}, and this version reads formats {READABLE_VERSIONS} only: "
            "use the version of gmlp_scale that wrote it, or begin a new run"
        )


def _verify_files(path: Path, done: _Done) -> None:
    """Raises CheckpointError unless every file has its checksum and holds the tensors that the index says."""
    shapes = {name: {} for name in done.files}
    for key, tensor in done.tensors.items():
        for name, _, count in tensor.pieces_between(0, tensor.length):
            if name not in shapes:
                raise CheckpointError(f"{path.name}: DONE has pieces in a file that it does not list: {name}")
            shapes[name][key] = tensor.piece_shape(count)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda name: file_problem(path / name, done.files[name], shapes[name]), done.files)
        problems = [problem for problem in found if problem]
    if problems:
        raise CheckpointError(f"{path.name}: {', '.join(problems)}")


def folder_name(step: int) -> str:
    return f"step_{step:09d}"


def step_of(name: str) -> int:
    """The step of a checkpoint's folder."""
    return int(name.removeprefix("step_"))


def step_folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step_*") if STEP_FOLDER.fullmatch(path.name))


def difference(found: Mapping[str, tuple], expected: Mapping[str, tuple]) -> str:
    """Names the first three parameters that are missing, unknown or of another shape."""
    lines = [
        f"{name} is {found.get(name, 'missing')} and should be {expected.get(name, 'absent')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
