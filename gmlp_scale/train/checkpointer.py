"""Saves checkpoints in the background and finds the one to resume from. gmlp_scale/train/checkpoint.py has the format
and the steps of a save."""

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
from typing import Any

import torch
from pydantic import BaseModel, PositiveInt
from torch import Tensor

from gmlp_scale.engine import Engine, Piece
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
from gmlp_scale.train.checkpoint_index import file_name, merged

logger = logging.getLogger("gmlp_scale")

FILE_BYTES = 128 * 2**20  # so that a rank has several files and hashes one while it writes another
NUM_WRITER_THREADS = 3
CLOSE_GRACE_SECONDS = 10.0


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    save_every_steps: PositiveInt
    """Save after every so many steps, and also where the run stops."""
    keep_last: PositiveInt = 3
    """How many checkpoints stay on disk: the newest."""
    asynchronous: bool = True
    """Write in the background. False: a save returns once the checkpoint is complete, and raises if it failed."""


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    Args:
        directory: the run's `checkpoints` folder, on a filesystem that all ranks share; no other run may write there.
        details: JSON-able; every checkpoint holds them. A resumed run compares them with its own.
        broadcast: collective; returns rank 0's small JSON-able value on every rank.
        timeout_seconds: how long a save waits for every rank's part before it fails. In `wait` the other ranks wait for
            rank 0, so this must be below the process group's timeout.

    A save that fails in the background neither stops training nor touches an earlier checkpoint. The error is logged at
    once and kept as `last_error` until a save succeeds. `wait`, to be called after the run's last save, raises it.
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
        """Collective: rank 0 finds the newest_checkpoint and verifies it, and all ranks open it.

        Renames damaged ones, since the run will save its own when it reaches those steps again.
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

    def save(self, engine: Engine, step: int) -> float:
        """Begins a checkpoint of `engine` after `step` updates; returns the seconds for which training waited.

        First waits for the save before. Does not save a step again that it has saved or resumed from.
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
        """Collective: returns once the last save is complete; if it failed, raises CheckpointError on every rank."""
        self._join()
        self.last_error = self._broadcast(self.last_error)
        if self.last_error:
            self._newest_step = None  # so that this step may be tried again
            raise CheckpointError(self.last_error)

    def close(self) -> None:
        """Ends the background thread. Not collective: waits CLOSE_GRACE_SECONDS for other ranks, which may be gone."""
        self._deadline = min(self._deadline, time.monotonic() + CLOSE_GRACE_SECONDS)
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, engine: Engine) -> dict[str, Piece]:
        """Copies this rank's pieces to host buffers, pinned if the pieces are on a GPU; later saves use them again."""
        pieces, gpu = {}, None
        for key, piece in engine.state():
            source = piece.tensor.detach()
            assert source.dtype == torch.float32 and source.shape[1:] == piece.shape[1:], key
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != source.shape:
                buffer = torch.empty(source.shape, dtype=torch.float32, device="cpu", pin_memory=source.is_cuda)
                self._buffers[key] = buffer
            buffer.copy_(source, non_blocking=True)
            gpu = source.device if source.is_cuda else gpu
            pieces[key] = Piece(buffer, piece.shape, piece.first)
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()
        return pieces

    def _write(self, step: int, pieces: dict[str, Piece]) -> None:
        """The background thread: steps 2 and 3 of a save, and on rank 0 all later ones."""
        final = self.directory / folder_name(step)
        folder = final.with_name(f"{final.name}.tmp-{self._token}")
        try:
            folder.mkdir(exist_ok=True)
            try:
                receipt = _write_pieces(folder, self.rank, pieces)
            except Exception as error:
                receipt = {"error": f"rank {self.rank}: {error!r}"}
                for path in folder.glob(f"rank_{self.rank:05d}_*"):  # makes room for the receipt on a full disk
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
        """Turns all ranks' receipts into DONE and the folder into a checkpoint, then deletes the oldest ones."""
        receipts = self._collect_receipts(folder)
        if errors := [receipt["error"] for receipt in receipts if "error" in receipt]:
            raise CheckpointError("; ".join(errors))
        for path in folder.glob("rank_*.json"):
            path.unlink()
        files = {name: record for receipt in receipts for name, record in receipt["files"].items()}
        tensors = merged([receipt["tensors"] for receipt in receipts])
        done = {"format_version": FORMAT_VERSION, "step": step, "details": self.details, "files": files}
        done["tensors"] = tensors
        write_text(folder / "DONE", sealed(json.dumps(done)))
        folder.rename(final)
        fsync(self.directory)
        for old in step_folders(self.directory)[: -self.config.keep_last]:
            _remove(old)

    def _collect_receipts(self, folder: Path) -> list[dict[str, Any]]:
        """Waits for every rank's receipt. A missing one counts as an error like those that ranks report."""
        names = [f"rank_{rank:05d}.json" for rank in range(self.world_size)]
        while not set(names) <= set(os.listdir(folder)) and time.monotonic() < self._deadline:
            time.sleep(0.05)
        receipts = [json.loads((folder / name).read_text()) for name in names if (folder / name).exists()]
        if silent := [rank for rank, name in enumerate(names) if not (folder / name).exists()]:
            found = f"nothing came in time from ranks {silent}, which must be able to write {folder}"
            receipts.append({"error": found})
        return receipts


def _write_pieces(folder: Path, rank: int, pieces: dict[str, Piece]) -> dict[str, Any]:
    """Writes and fsyncs one rank's pieces, a new file about every FILE_BYTES; returns its receipt."""
    contents, tensors, num_bytes = {}, {}, 0
    for key, piece in pieces.items():
        file_number, count = num_bytes // FILE_BYTES, len(piece.tensor) if piece.shape else 1
        tensors[key] = (piece.shape, file_number, piece.first, count)
        if count:
            contents.setdefault(file_name(rank, file_number), {})[key] = piece.tensor
            num_bytes += piece.tensor.nbytes

    def write(name: str) -> dict[str, Any]:
        return write_safetensors(contents[name], folder / name).model_dump()

    with ThreadPoolExecutor(NUM_WRITER_THREADS) as pool:
        files = dict(zip(contents, pool.map(write, contents), strict=True))
    fsync(folder)
    return {"files": files, "tensors": tensors}


def _remove(folder: Path) -> None:
    """Deletes a folder. A checkpoint is renamed first, so that half of one never has its name."""
    try:
        if STEP_FOLDER.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-deleted"))
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("could not delete %s: %s", folder, error)
