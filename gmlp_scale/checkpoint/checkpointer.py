"""Saves checkpoints in the background and finds the one to resume from. gmlp_scale/checkpoint/format.py has the format
and the steps of a save."""

import errno
import json
import logging
import math
import threading
import time
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from gmlp_scale.checkpoint.checkpoint_config import CheckpointConfig
from gmlp_scale.checkpoint.checkpoint_files import write_pieces
from gmlp_scale.checkpoint.checkpoint_index import merged
from gmlp_scale.checkpoint.format import FORMAT_VERSION, Checkpoint, CheckpointError, folder_name, step_of
from gmlp_scale.checkpoint.local_checkpoints import LocalCheckpoints, remove
from gmlp_scale.checkpoint.remote_checkpoints import RemoteCheckpoints
from gmlp_scale.checkpoint.staging import StagingBuffers
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, Piece
from gmlp_scale.storage.files import sealed

logger = logging.getLogger("gmlp_scale")

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 0.5
CLOSE_GRACE_SECONDS = 10.0
RETRY_SECONDS = 30.0
MOST_ERRORS_SHOWN = 3
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    Args:
        place: the run's `checkpoints` folder, on a filesystem that all ranks share, or at a URL. No other run may write
            there.
        details: JSON-able; every checkpoint holds them. A resumed run compares them with its own.
        timeout_seconds: how long rank 0 waits for every rank's part of a save before it fails.

    A save that fails in the background neither stops training nor touches an earlier checkpoint. The error is logged at
    once and kept as rank 0's `last_error` until a save succeeds. If the disk refused it, the background threads write
    the same step again after a while, until the next save begins. `wait` is to be called after the run's last save.
    """

    def __init__(
        self,
        place: Path | RemoteCheckpoints,
        config: CheckpointConfig,
        *,
        details: dict[str, Any],
        world: World,
        timeout_seconds: float,
    ):
        self.details = json.loads(json.dumps(details, allow_nan=False))  # what is not JSON fails here
        self.config, self.world, self.timeout_seconds = config, world, timeout_seconds
        self.checkpoints = LocalCheckpoints(place) if isinstance(place, Path) else place
        self.directory = self.checkpoints.directory
        """Local: where the ranks of this host write and read."""
        self.last_error: str | None = None
        self._thread: threading.Thread | None = None
        self._no_more_attempts = threading.Event()
        self._close_deadline, self._is_hearing = math.inf, False
        self._num_attempts = 0
        self._newest_step: int | None = None
        self._kept_step: int | None = None
        self._staging = StagingBuffers()
        self._token = world.broadcast(uuid.uuid4().hex[:8])

    def keep(self, step: int | None) -> None:
        """The checkpoint after this step stays for good."""
        self._kept_step = step

    def newest(self) -> Checkpoint | None:
        """Collective: rank 0 finds the newest_checkpoint and verifies it, and all ranks open it.

        Deletes what killed saves left. Renames damaged checkpoints, since the run will save those steps again when it
        reaches them.
        """
        name, error = None, None
        if self.world.rank == 0:
            try:
                self.checkpoints.delete_unfinished()
                checkpoint, damaged = self.checkpoints.newest()
                for damaged_name in damaged:
                    self.checkpoints.set_aside(damaged_name, f"damaged-{self._token}")
                name = checkpoint.path.name if checkpoint else None
            except (CheckpointError, OSError) as problem:
                error = str(problem)
        name, error = self.world.broadcast([name, error])
        if error:
            raise CheckpointError(error)
        if name is None:
            return None
        if isinstance(self.checkpoints, RemoteCheckpoints):
            self._copy_to_other_hosts(name)
        checkpoint = Checkpoint.open(self.directory / name, verify_files=False)
        self._newest_step = checkpoint.step
        return checkpoint

    def _copy_to_other_hosts(self, name: str) -> None:
        """Collective: every host gets the copy that rank 0's host has."""
        error = None
        if self.world.local_rank == 0 and self.world.rank != 0:
            try:
                self.checkpoints.open(name)
            except (CheckpointError, OSError) as problem:
                error = problem
        failed = [rank for rank, has_failed in enumerate(self.world.gather(int(error is not None))) if has_failed]
        if failed:
            raise CheckpointError(f"{name} could not be copied to the hosts of ranks {failed}: {error or 'see there'}")

    def save(self, engine: Engine, step: int, states: Mapping[str, Any] = MappingProxyType({})) -> float:
        """Begins a checkpoint of `engine` after `step` updates; returns the seconds for which training waited.

        states: JSON-able, by name. This checkpoint's details have them beside those of all checkpoints.

        First waits for the save before it, which is then not tried again. Does nothing for a step that it has saved, is
        saving or has resumed from.
        """
        started = time.monotonic()
        if step == self._newest_step:
            return 0.0
        assert self._newest_step is None or step > self._newest_step, f"step {step} after step {self._newest_step}"
        self._no_more_attempts.set()
        self._settle()
        pieces = self._staging.copy(engine)
        self._newest_step, self._began = step, started
        self._details = {**self.details, **states}
        logger.info("saving %s", folder_name(step))
        self._no_more_attempts.clear()
        self._thread = threading.Thread(target=self._save, args=(step, pieces), name="checkpoint", daemon=True)
        self._thread.start()
        if not self.config.asynchronous:
            self._no_more_attempts.set()
            self.wait()
        return time.monotonic() - started

    def wait(self) -> None:
        """Collective: returns once the last save is complete; if it failed, raises CheckpointError on every rank.

        While the disk refuses it, the save is tried again until it succeeds or a rank is signalled to stop.
        """
        self._settle()
        self.last_error = self.world.broadcast(self.last_error)
        if self.last_error:
            self._newest_step = None  # so that this step may be tried again
            raise CheckpointError(self.last_error)

    def close(self) -> None:
        """Ends the background thread. Not collective, since other ranks may be gone: waits CLOSE_GRACE_SECONDS for
        them, and not at all once some are known to be lost."""
        self._no_more_attempts.set()
        self._close_deadline = time.monotonic() + (0 if self.world.has_lost_ranks else CLOSE_GRACE_SECONDS)
        while self._is_saving(POLL_SECONDS):
            if self._is_hearing and time.monotonic() > self._close_deadline + 1:
                return  # the process that holds the store stands still, and its clients wait without end

    def _settle(self) -> None:
        """Collective: returns once no rank is saving any more. All ranks meet again and again meanwhile: a rank that
        died is noticed at once, and one that stands still after the process group's timeout."""
        while any(self.world.gather(int(self._is_saving(HEARTBEAT_SECONDS)))):
            if any(self.world.gather(int(self.world.is_stop_signalled))):
                self._no_more_attempts.set()
        self._thread = None

    def _is_saving(self, wait_seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(wait_seconds)
        return self._thread is not None and self._thread.is_alive()

    def _save(self, step: int, pieces: dict[str, Piece]) -> None:
        """The background thread: steps 2 to 7 of a save."""
        try:
            while self._attempt(step, pieces):
                pass
        except Exception as error:  # rank 0 or its store is gone, or this run is being closed
            self.last_error = f"{folder_name(step)} could not be saved: {error}"
            logger.error("%s. Earlier checkpoints are untouched", self.last_error)

    def _attempt(self, step: int, pieces: dict[str, Piece]) -> bool:
        """Writes this rank's files and, on rank 0, the checkpoint. Returns whether all ranks shall try again."""
        self._num_attempts += 1  # the same on every rank
        folder = self.directory / f"{folder_name(step)}.tmp-{self._token}-{self._num_attempts}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            receipt = write_pieces(folder, self.world.rank, pieces)
            self.checkpoints.upload(folder, list(receipt["files"]), folder_name(step))
        except Exception as error:
            receipt = _failure(self.world.rank, error)
        try:
            return self._share_outcome(folder, step, receipt)
        finally:
            if self.world.local_rank == 0:
                self.checkpoints.end_attempt(folder)

    def _share_outcome(self, folder: Path, step: int, receipt: dict[str, Any]) -> bool:
        if self.world.rank == 0:
            is_again = False
            try:
                is_again = self._conclude(folder, step, receipt)
            finally:
                self._tell(f"{folder.name}/again", is_again)
            return is_again
        self.last_error = receipt.get("error")
        if self.last_error:
            logger.error("%s could not be saved: %s", folder_name(step), self.last_error)
        self._tell(f"{folder.name}/{self.world.rank}", receipt)
        return self._hear(f"{folder.name}/again", math.inf)

    def _conclude(self, folder: Path, step: int, receipt: dict[str, Any]) -> bool:
        """Rank 0: makes the checkpoint if no rank failed; else logs why. Returns whether all ranks shall try again."""
        receipts = [receipt, *self._hear_receipts(folder.name)]
        failures = [receipt for receipt in receipts if "error" in receipt]
        if not failures:
            try:
                self._publish(folder, step, receipts)
            except Exception as error:
                failures = [_failure(0, error)]
        if not failures:
            self.last_error = None
            num_bytes = sum(record["bytes"] for receipt in receipts for record in receipt["files"].values())
            size, seconds = tqdm.format_sizeof(num_bytes, "B"), time.monotonic() - self._began
            logger.info("saved %s: %s in %.1f s", folder_name(step), size, seconds)
            return False
        errors = [failure["error"] for failure in failures]
        if len(errors) > MOST_ERRORS_SHOWN:
            errors[MOST_ERRORS_SHOWN:] = [f"and {len(errors) - MOST_ERRORS_SHOWN} more ranks failed"]
        self.last_error = f"{folder_name(step)} could not be saved: {'; '.join(errors)}"
        if folder.exists():
            remove(folder)
        return self._may_try_again({failure["errno"] for failure in failures})

    def _stays(self, name: str) -> bool:
        return step_of(name) == self._kept_step or self.config.stays(name)

    def _may_try_again(self, numbers: set[int | None]) -> bool:
        """Whether to try again. Unless it could make room, it waits RETRY_SECONDS before it says yes.

        numbers: the errnos of the failures. None is a failure that neither the disk nor the store caused.
        """
        if (
            self.config.on_full_disk == "drop_oldest"
            and numbers <= _NO_ROOM
            and (old := self.checkpoints.drop_oldest(self._stays))
        ):
            logger.warning("%s. Deleted %s to make room (checkpoint.on_full_disk)", self.last_error, old)
            return True
        if None in numbers or self._no_more_attempts.is_set():
            logger.error("%s. Earlier checkpoints are untouched", self.last_error)
            return False
        logger.error(
            "%s. Earlier checkpoints are untouched. Make room in %s: this step is tried again in %.0f s and, where the "
            "run has no more steps, until it is saved or a stop signal comes",
            self.last_error,
            self.checkpoints,
            RETRY_SECONDS,
        )
        return not self._no_more_attempts.wait(RETRY_SECONDS)

    def _publish(self, folder: Path, step: int, receipts: list[dict[str, Any]]) -> None:
        """Turns all ranks' receipts into DONE and the folder into a checkpoint, then deletes outdated checkpoints."""
        files = {name: record for receipt in receipts for name, record in receipt["files"].items()}
        tensors = merged([receipt["layout"] for receipt in receipts])
        done = {"format_version": FORMAT_VERSION, "step": step, "details": self._details, "files": files}
        text = sealed(json.dumps({**done, "tensors": tensors}))
        self.checkpoints.publish(folder, folder_name(step), text)
        try:
            for old in self.config.outdated(self.checkpoints.names()):
                if not self._stays(old):
                    self.checkpoints.delete(old)
        except OSError as error:
            logger.warning("old checkpoints could not be deleted: %s", error)

    def _hear_receipts(self, attempt: str) -> list[dict[str, Any]]:
        """The other ranks' receipts. The ranks whose receipts did not come in time are one more failure."""
        receipts, silent, deadline = [], [], time.monotonic() + self.timeout_seconds
        for rank in range(1, self.world.size):
            try:
                receipts.append(self._hear(f"{attempt}/{rank}", deadline))
                self.world.store.delete_key(f"{attempt}/{rank}")
            except TimeoutError:
                silent.append(rank)
        if silent:
            receipts.append({"error": f"nothing came in time from ranks {silent}", "errno": None})
        return receipts

    def _tell(self, key: str, value: Any) -> None:
        self.world.store.set(key, zlib.compress(json.dumps(value).encode()))  # the store takes at most 8 MiB

    def _hear(self, key: str, deadline: float) -> Any:
        """What another rank told. TimeoutError if it does not come before the deadline, or in the grace of `close`."""
        self._is_hearing = True
        try:
            while not self.world.store.check([key]):
                if time.monotonic() > min(deadline, self._close_deadline):
                    raise TimeoutError(f"{key} did not come")
                time.sleep(POLL_SECONDS)
            return json.loads(zlib.decompress(self.world.store.get(key)))
        finally:
            self._is_hearing = False


def _failure(rank: int, error: Exception) -> dict[str, Any]:
    number = error.errno or errno.EIO if isinstance(error, OSError) else None  # a store's errors have no number
    return {"error": f"rank {rank}: {error!r}", "errno": number}
