"""Portable checkpoints: written by any engine at any world size, read by any other.

    checkpoints/step_000012000/rank_00000_000.safetensors   float32 row ranges ("pieces") that rank 0 owns,
                               rank_00000_001.safetensors   a new file about every FILE_BYTES
                               rank_00001_000.safetensors   ...
                               DONE                         JSON: where each tensor's rows lie, each file's bytes and
                                                            sha256, step, details, its own sha256 (class `_Done`)

Keys are model.<name>, optimizer.<name>.exp_avg and optimizer.<name>.exp_avg_sq. Only safetensors and JSON are read:
nothing is ever unpickled. A save goes through these events, without a collective in the background:

 1. `save` copies this rank's pieces to staging buffers on the calling thread; training goes on.
 2. A background thread of each rank writes, hashes and fsyncs its files in step_000012000.tmp-<token of the run>
 3. and then its receipt rank_00000.json there: which rows lie in which file, or the error that stopped it.
 4. Rank 0's thread waits for all receipts, checks that the pieces hold every row once, writes and fsyncs DONE,
 5. renames the folder to step_000012000 and fsyncs the parent,
 6. deletes all but the newest `keep_last`, each renamed to a temporary name first.

A kill before 5 leaves a temporary folder, which the next run on this folder removes, as it does one left by 6. The
rename is the only commit and is atomic in POSIX, so a checkpoint's name is absent or holds the whole. Were DONE written
after the rename, a kill between the two would leave a folder that has the name, is no checkpoint, and is in the resumed
run's way. Nor is the filesystem trusted: before a tensor is used, every file that DONE names must have its sha256.
"""

import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, PositiveInt
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from gmlp_scale.engine import Engine

logger = logging.getLogger("gmlp_scale")

FILE_BYTES = 256 * 2**20  # several files a rank: hashing then overlaps with writing, and a check uses every core
NUM_WRITER_THREADS = 2
CLOSE_GRACE_SECONDS = 10.0
STEP_FOLDER = re.compile(r"step_\d{9}")
PIECE_FILE = re.compile(r"rank_\d{5}_\d{3}\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or one that is there cannot be used."""


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    save_every_steps: PositiveInt
    """A checkpoint after every so many steps; one is also written where a run stops."""
    keep_last: PositiveInt = 3
    """How many of the newest checkpoints stay on disk."""
    asynchronous: bool = True
    """Write in the background. False: a save returns once the checkpoint is complete, and raises if it failed."""


class _FileRecord(BaseModel, frozen=True, extra="forbid"):
    bytes: int
    sha256: str


class _TensorRecord(BaseModel, frozen=True, extra="forbid"):
    shape: tuple[int, ...]
    pieces: list[tuple[str, int, int]]
    """(file, first_row, num_rows), ascending, without gap or overlap; a 0-d tensor is one row."""


class _Done(BaseModel, frozen=True, extra="forbid"):
    format_version: Literal[1]
    step: int
    details: dict[str, Any]
    files: dict[str, _FileRecord]
    tensors: dict[str, _TensorRecord]
    sha256: str
    """Of DONE's text without this field."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, verified when it was opened."""

    path: Path
    step: int
    details: dict[str, Any]
    tensors: dict[str, _TensorRecord] = field(repr=False)
    _files: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path, verify_files: bool = True) -> "Checkpoint":
        """Read DONE and check all files against it (unless rank 0 did). CheckpointError names what is wrong."""
        try:
            text = (path / "DONE").read_text(encoding="ascii")
            if _sealed(text[: text.rfind(", ")] + "}") != text:
                raise ValueError("its own checksum does not hold")
            done = _Done.model_validate_json(text)
            if path.name != folder_name(done.step):
                raise ValueError(f"it is of step {done.step}")
            if not all(PIECE_FILE.fullmatch(name) for name in done.files):
                raise ValueError(f"it names files that no checkpoint has: {list(done.files)}")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path.name} has no DONE") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path.name}: DONE cannot be used: {error}") from error
        if verify_files:
            _verify_files(path, done.files)
        return cls(path, done.step, done.details, done.tensors)

    @property
    def keys(self) -> list[str]:
        return list(self.tensors)

    def read(self, key: str, first_row: int = 0, stop_row: int | None = None) -> Tensor:
        """Rows [first_row, stop_row) along dimension 0, float32 on CPU, in their own memory; a 0-d tensor is one row.

        Raises CheckpointError for an unknown key or rows that the tensor does not have.
        """
        if key not in self.tensors:
            near = difflib.get_close_matches(key, self.tensors, n=3)
            raise CheckpointError(f"{self.path} has no {key!r} among {len(self.tensors)} tensors; nearest: {near}")
        shape, pieces = self.tensors[key].shape, self.tensors[key].pieces
        num_rows = shape[0] if shape else 1
        stop_row = num_rows if stop_row is None else stop_row
        if not 0 <= first_row <= stop_row <= num_rows:
            raise CheckpointError(f"{self.path} has {key!r} of shape {shape}, not its rows {first_row} to {stop_row}")
        rows = torch.empty((stop_row - first_row, *shape[1:]) if shape else (), dtype=torch.float32, device="cpu")
        for file, piece_first, num_piece_rows in pieces:
            low, high = max(first_row, piece_first), min(stop_row, piece_first + num_piece_rows)
            if not shape:
                rows.copy_(self._file(file).get_tensor(key))
            elif low < high:
                piece = self._file(file).get_slice(key)
                rows[low - first_row : high - first_row] = piece[low - piece_first : high - piece_first]
        return rows

    def load_into(self, engine: "Engine") -> None:
        engine.load_state(self.read, self.step)

    def _file(self, name: str):
        if name not in self._files:
            self._files[name] = safe_open(self.path / name, "pt")  # a memory map without a descriptor: all stay open
        return self._files[name]


def newest_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest checkpoint whose every checksum holds, and the damaged newer ones, which a warning names.

    None where there is no checkpoint; CheckpointError naming each where all are damaged. Changes nothing on disk.
    """
    problems: dict[Path, str] = {}
    for path in reversed(_step_folders(directory)):
        try:
            checkpoint = Checkpoint.open(path)
        except CheckpointError as error:
            problems[path] = str(error)
            continue
        if problems:
            logger.warning("damaged checkpoint: %s. Taking %s instead", "; ".join(problems.values()), path.name)
        return checkpoint, list(problems)
    if problems:
        found = "; ".join(problems.values())
        raise CheckpointError(f"no checkpoint in {directory} is whole: {found}. Move them away to start from step 0")
    return None, []


class _StagedPiece(NamedTuple):
    key: str
    rows: Tensor  # float32, in host memory
    shape: tuple[int, ...]
    first_row: int


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    directory: the run's `checkpoints` folder, on a filesystem that all ranks share; no other run may write there.
    broadcast: collective; returns rank 0's small JSON-able value on every rank.
    timeout_seconds: a save that lacks a rank's part so long after its start is given up. `wait` has the other ranks
        wait for rank 0, so choose it below the process group's own timeout.

    A save that fails in the background neither stops training nor touches an earlier checkpoint: it is logged at once,
    kept as `last_error` until a save succeeds, and raised by `wait`, to be called after the run's last save.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        rank: int,
        world_size: int,
        broadcast: Callable[[Any], Any],
        timeout_seconds: float = 300.0,
    ):
        self.directory, self.config, self.rank, self.world_size = directory, config, rank, world_size
        self.last_error: str | None = None
        self._broadcast, self._timeout_seconds, self._deadline = broadcast, timeout_seconds, 0.0
        self._thread: threading.Thread | None = None
        self._newest_step: int | None = None
        self._buffers: dict[str, Tensor] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for leftover in directory.glob("step_*.tmp-*"):
                _remove(leftover)
        self._token = broadcast(uuid.uuid4().hex[:8])

    def newest(self) -> Checkpoint | None:
        """Collective `newest_checkpoint`: rank 0 verifies, all take the same one.

        Damaged ones are set aside under another name, as the run will write its own when it reaches that step again.
        """
        name, error = None, None
        if self.rank == 0:
            try:
                checkpoint, damaged = newest_checkpoint(self.directory)
                for path in damaged:
                    path.rename(path.with_name(f"{path.name}.damaged-{self._token}"))
                name = checkpoint.path.name if checkpoint else None
            except (CheckpointError, OSError) as problem:
                error = str(problem)
        name, error = self._broadcast([name, error])
        if error:
            raise CheckpointError(error)
        if name is None:
            return None
        checkpoint = Checkpoint.open(self.directory / name, verify_files=False)
        self._newest_step = checkpoint.step
        return checkpoint

    def save(self, engine: "Engine", step: int, details: dict[str, Any]) -> float:
        """Begin a checkpoint of `engine` after `step` updates; return the seconds that training stood still for it.

        At most one save is in flight: this one first waits for the one before. A step already saved or resumed from is
        not saved again. details: JSON-able.
        """
        started = time.monotonic()
        if step == self._newest_step:
            return 0.0
        assert self._newest_step is None or step > self._newest_step, f"step {step} after step {self._newest_step}"
        details = json.loads(json.dumps(details, allow_nan=False))  # a copy; and what is no JSON fails here already
        self._join()
        pieces = self._stage(engine)
        self._newest_step, self._deadline = step, started + self._timeout_seconds
        self._thread = threading.Thread(target=self._write, args=(step, details, pieces), name="checkpoint")
        self._thread.start()
        if not self.config.asynchronous:
            self.wait()
        return time.monotonic() - started

    def wait(self) -> None:
        """Collective: return once the last save is complete; if it failed, raise CheckpointError on every rank."""
        self._join()
        self.last_error = self._broadcast(self.last_error)
        if self.last_error:
            self._newest_step = None  # so that this step may be tried again
            raise CheckpointError(self.last_error)

    def close(self) -> None:
        """End the background thread. Not collective: others may be gone; they are waited for CLOSE_GRACE_SECONDS."""
        self._deadline = min(self._deadline, time.monotonic() + CLOSE_GRACE_SECONDS)
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, engine: "Engine") -> list[_StagedPiece]:
        """Copy this rank's pieces to host buffers that later saves use again (pinned for pieces on an accelerator)."""
        pieces, accelerator = [], None
        for key, piece in engine.state():
            source = piece.tensor.detach()
            assert source.dtype == torch.float32 and source.shape[1:] == piece.shape[1:], key
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape:
                buffer = torch.empty(source.shape, dtype=torch.float32, device="cpu", pin_memory=source.is_cuda)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            accelerator = source.device if source.is_cuda else accelerator
            pieces.append(_StagedPiece(key, buffer, tuple(piece.shape), piece.first_row))
        if accelerator is not None:
            torch.cuda.current_stream(accelerator).synchronize()
        return pieces

    def _write(self, step: int, details: dict[str, Any], pieces: list[_StagedPiece]) -> None:
        """The background thread: events 2 and 3, and on rank 0 those after them."""
        final = self.directory / folder_name(step)
        folder = final.with_name(f"{final.name}.tmp-{self._token}")
        try:
            folder.mkdir(exist_ok=True)
            try:
                receipt = _write_pieces(folder, self.rank, pieces)
            except Exception as error:
                receipt = {"error": f"rank {self.rank}: {error!r}"}
                for path in folder.glob(f"rank_{self.rank:05d}_*"):  # room for the receipt on a full disk
                    path.unlink()
            _write_text(folder / f"rank_{self.rank:05d}.json", json.dumps(receipt))
            if self.rank == 0:
                self._publish(folder, final, step, details)
            self.last_error = receipt.get("error")
        except Exception as error:
            self.last_error = f"{final.name} could not be saved: {error}"
            if self.rank == 0 and folder.exists():
                _remove(folder)
        if self.last_error:
            logger.error("%s. Earlier checkpoints are untouched", self.last_error)

    def _publish(self, folder: Path, final: Path, step: int, details: dict[str, Any]) -> None:
        """Turn all ranks' receipts into DONE and the folder into a checkpoint, then delete the oldest ones."""
        receipts = self._collect_receipts(folder)
        if errors := [receipt["error"] for receipt in receipts if "error" in receipt]:
            raise CheckpointError("; ".join(errors))
        for path in folder.glob("rank_*.json"):
            path.unlink()
        done = {"format_version": 1, "step": step, "details": details, **_merged(receipts)}
        _write_text(folder / "DONE", _sealed(json.dumps(done)))
        folder.rename(final)
        _fsync(self.directory)
        for old in _step_folders(self.directory)[: -self.config.keep_last]:
            _remove(old)

    def _collect_receipts(self, folder: Path) -> list[dict[str, Any]]:
        """Wait for every rank's receipt; a rank that says nothing in time is an error like those that ranks report."""
        names = [f"rank_{rank:05d}.json" for rank in range(self.world_size)]
        while not set(names) <= set(os.listdir(folder)) and time.monotonic() < self._deadline:
            time.sleep(0.05)
        receipts = [json.loads((folder / name).read_text()) for name in names if (folder / name).exists()]
        if silent := [rank for rank, name in enumerate(names) if not (folder / name).exists()]:
            receipts.append(
                {"error": f"nothing came in time from ranks {silent}, which must be able to write {folder}"}
            )
        return receipts


def _write_pieces(folder: Path, rank: int, pieces: list[_StagedPiece]) -> dict[str, Any]:
    """Write one rank's pieces durably, a new file about every FILE_BYTES; return its receipt."""
    contents, tensors, num_bytes = {}, {}, 0
    for key, rows, shape, first_row in pieces:
        name = f"rank_{rank:05d}_{num_bytes // FILE_BYTES:03d}.safetensors"
        num_rows = len(rows) if shape else 1
        tensors[key] = (shape, name, first_row, num_rows)
        if num_rows:
            contents.setdefault(name, {})[key] = rows
            num_bytes += rows.nbytes

    def write(name: str) -> dict[str, Any]:
        path = folder / name
        save_file(contents[name], path)
        path.chmod(folder.stat().st_mode & 0o666)  # as the umask has it: save_file leaves the owner's rights alone
        record = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _fsync(path)
        return record

    with ThreadPoolExecutor(NUM_WRITER_THREADS) as pool:
        files = dict(zip(contents, pool.map(write, contents), strict=True))
    _fsync(folder)
    return {"files": files, "tensors": tensors}


def _merged(receipts: list[dict[str, Any]]) -> dict[str, Any]:
    """DONE's `files` and `tensors` from all ranks' receipts."""
    files, tensors = {}, {}
    for receipt in receipts:
        files.update(receipt["files"])
        for key, (shape, name, first_row, num_rows) in receipt["tensors"].items():
            tensor = tensors.setdefault(key, {"shape": shape, "pieces": []})
            assert tensor["shape"] == shape, f"{key} has shape {tensor['shape']} on one rank and {shape} on another"
            if num_rows:
                tensor["pieces"].append((name, first_row, num_rows))
    for key, tensor in tensors.items():
        tensor["pieces"].sort(key=lambda piece: piece[1])
        starts = [first_row for _, first_row, _ in tensor["pieces"]]
        stops = [first_row + num_rows for _, first_row, num_rows in tensor["pieces"]]
        num_rows = tensor["shape"][0] if tensor["shape"] else 1
        assert [0, *stops] == [*starts, num_rows], f"{key}: the ranks' pieces do not hold each row once: {tensor}"
    return {"files": files, "tensors": tensors}


def _verify_files(path: Path, files: dict[str, _FileRecord]) -> None:
    def problem(name: str) -> str | None:
        try:
            if (num_bytes := (path / name).stat().st_size) != files[name].bytes:
                return f"{name} has {num_bytes} of {files[name].bytes} bytes"
            return None if _sha256(path / name) == files[name].sha256 else f"{name} does not have its sha256"
        except OSError as error:
            return f"{name}: {error.strerror}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        problems = [found for found in pool.map(problem, files) if found]
    if problems:
        raise CheckpointError(f"{path.name}: {', '.join(problems)}")


def folder_name(step: int) -> str:
    return f"step_{step:09d}"


def _step_folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step_*") if STEP_FOLDER.fullmatch(path.name))


def _sealed(body: str) -> str:
    """A JSON object's text with the sha256 of that text as its last field."""
    return f'{body[:-1]}, "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"}}'


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    """Durably, and whole as soon as it has its name."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="ascii")
    _fsync(partial)
    partial.rename(path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Delete a folder. A checkpoint loses its name first, so that half of one is never taken for one."""
    try:
        if STEP_FOLDER.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-deleted"))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("could not delete %s: %s", folder, error)
