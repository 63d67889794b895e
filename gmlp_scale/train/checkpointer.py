"""Saves checkpoints in the background and finds the one to resume from. gmlp_scale/train/checkpoint.py has the format
and the order of events."""

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import BaseModel, PositiveInt
from torch import Tensor

from gmlp_scale.files import write_text
from gmlp_scale.train.checkpoint import (
    FORMAT_VERSION,
    STEP_FOLDER,
    Checkpoint,
    CheckpointError,
    folder_name,
    newest_checkpoint,
    step_folders,
)
from gmlp_scale.train.checkpoint_files import fsync, sealed, write_safetensors

if TYPE_CHECKING:
    from gmlp_scale.engine import Engine

logger = logging.getLogger("gmlp_scale")

FILE_BYTES = 128 * 2**20  # several files a rank: one is hashed while another is on its way to the disk
NUM_WRITER_THREADS = 3
CLOSE_GRACE_SECONDS = 10.0


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    save_every_steps: PositiveInt
    """A checkpoint after every so many steps; one is also written where a run stops."""
    keep_last: PositiveInt = 3
    """How many of the newest checkpoints stay on disk."""
    asynchronous: bool = True
    """Write in the background. False: a save returns once the checkpoint is complete, and raises if it failed."""


class _StagedPiece(NamedTuple):
    key: str
    rows: Tensor  # float32, in host memory
    shape: tuple[int, ...]
    first_row: int


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    directory: the run's `checkpoints` folder, on a filesystem that all ranks share; no other run may write there.
    details: JSON-able; every checkpoint holds them. A resumed run compares them with its own.
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
        details: dict[str, Any],
        rank: int,
        world_size: int,
        broadcast: Callable[[Any], Any],
        timeout_seconds: float,
    ):
        self.details = json.loads(json.dumps(details, allow_nan=False))  # what is not JSON fails here
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

    def save(self, engine: "Engine", step: int) -> float:
        """Begin a checkpoint of `engine` after `step` updates; return the seconds that training stood still for it.

        At most one save is in flight: this one first waits for the one before. A step already saved or resumed from is
        not saved again.
        """
        started = time.monotonic()
        if step == self._newest_step:
            return 0.0
        assert self._newest_step is None or step > self._newest_step, f"step {step} after step {self._newest_step}"
        self._join()
        pieces = self._stage(engine)
        self._newest_step, self._deadline = step, time.monotonic() + self._timeout_seconds
        self._thread = threading.Thread(target=self._write, args=(step, pieces), name="checkpoint")
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

    def _write(self, step: int, pieces: list[_StagedPiece]) -> None:
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
            write_text(folder / f"rank_{self.rank:05d}.json", json.dumps(receipt))
            if self.rank == 0:
                self._publish(folder, final, step)
            self.last_error = receipt.get("error")
        except Exception as error:
            self.last_error = f"{final.name} could not be saved: {error}"
            if self.rank == 0 and folder.exists():
                _remove(folder)
        if self.last_error:
            logger.error("%s. Earlier checkpoints are untouched", self.last_error)

    def _publish(self, folder: Path, final: Path, step: int) -> None:
        """Turn all ranks' receipts into DONE and the folder into a checkpoint, then delete the oldest ones."""
        receipts = self._collect_receipts(folder)
        if errors := [receipt["error"] for receipt in receipts if "error" in receipt]:
            raise CheckpointError("; ".join(errors))
        for path in folder.glob("rank_*.json"):
            path.unlink()
        done = {"format_version": FORMAT_VERSION, "step": step, "details": self.details, **_merged(receipts)}
        write_text(folder / "DONE", sealed(json.dumps(done)))
        folder.rename(final)
        fsync(self.directory)
        for old in step_folders(self.directory)[: -self.config.keep_last]:
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
        return write_safetensors(contents[name], folder / name).model_dump()

    with ThreadPoolExecutor(NUM_WRITER_THREADS) as pool:
        files = dict(zip(contents, pool.map(write, contents), strict=True))
    fsync(folder)
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


def _remove(folder: Path) -> None:
    """Delete a folder. A checkpoint loses its name first, so that half of one is never taken for one."""
    try:
        if STEP_FOLDER.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-deleted"))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("could not delete %s: %s", folder, error)
