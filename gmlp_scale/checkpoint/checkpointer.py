"""Saves checkpoints in the background and finds the one to resume from. gmlp_scale/checkpoint/format.py has the format
and the steps of a save."""

import errno
import itertools
import json
import logging
import math
import threading
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor
from tqdm import tqdm

from gmlp_scale.checkpoint.config import CheckpointConfig
from gmlp_scale.checkpoint.format import FORMAT_VERSION, Checkpoint, CheckpointError, folder_name, step_of
from gmlp_scale.checkpoint.pieces import merged, staged
from gmlp_scale.checkpoint.stores import NEVER_PASSES, Checkpoints, newest_of, remove
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import Engine, Piece
from gmlp_scale.storage.files import sealed

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 0.5
CLOSE_GRACE_SECONDS = 10.0
RETRY_SECONDS = 30.0
MOST_ERRORS_SHOWN = 3
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True)
class _Save:
    """All that the background thread needs to know of one save."""

    step: int
    pieces: dict[str, Piece]
    """In the staging buffers, which nothing else writes to until the save has ended."""
    details: dict[str, Any]
    kept_step: int | None
    began: float
    """In seconds of time.monotonic()."""

    @property
    def name(self) -> str:
        return folder_name(self.step)


class Checkpointer:
    """Saves and finds the checkpoints of one run. Every rank has one and calls the same methods in the same order.

    Args:
        checkpoints: the run's. No other run may write there.
        details: JSON-able; every checkpoint holds them. A resumed run compares them with its own.
        timeout_seconds: how long rank 0 waits for every rank's part of a save before it fails.

    A save that fails in the background neither stops training nor touches an earlier checkpoint. The error is logged at
    once and kept as rank 0's `last_error` until a save succeeds. If the disk refused it, the background threads write
    the same step again after a while, until the next save begins. `wait` is to be called after the run's last save.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        config: CheckpointConfig,
        *,
        details: dict[str, Any],
        world: World,
        timeout_seconds: float,
    ):
        self.details = json.loads(json.dumps(details, allow_nan=False))  # what is not JSON fails here
        self.checkpoints, self.config = checkpoints, config
        self.world, self.timeout_seconds = world, timeout_seconds
        self.last_error: str | None = None
        self._thread: threading.Thread | None = None
        self._no_more_attempts = threading.Event()
        self._close_deadline, self._is_receiving = math.inf, False
        self._attempt_numbers = itertools.count(1)
        self._newest_step: int | None = None
        self._staging_buffers: dict[str, Tensor] = {}
        self._token = world.on_main(lambda: uuid.uuid4().hex[:8])

    def newest(self) -> Checkpoint | None:
        """Collective: rank 0 finds the newest checkpoint and verifies it, and all ranks open it.

        Deletes what killed saves left. Renames damaged checkpoints, since the run will save those steps again when it
        reaches them. Raises CheckpointError where all are damaged, InputError where none can be saved, and
        OtherRankError on the other ranks.
        """
        name = self.world.on_main(self._find_newest)
        if name is None:
            return None
        if not self.checkpoints.is_shared:
            needs_copy = self.world.local_rank == 0 and self.world.rank != 0  # rank 0 has copied it to its own host
            self.world.on_all(lambda: self._copy(name) if needs_copy else None)
        checkpoint = Checkpoint.open(self.checkpoints.directory / name, verify_files=False)
        self._newest_step = checkpoint.step
        return checkpoint

    def _find_newest(self) -> str | None:
        try:
            self.checkpoints.prepare()
            checkpoint, damaged = newest_of(self.checkpoints)
            for name in damaged:
                self.checkpoints.set_aside(name, f"damaged-{self._token}")
        except OSError as error:  # which may pass, so the exit code is that of CheckpointError
            raise CheckpointError(str(error)) from error
        return checkpoint.path.name if checkpoint else None

    def _copy(self, name: str) -> None:
        try:
            self.checkpoints.open(name)
        except OSError as error:
            raise CheckpointError(f"{name} could not be copied to this host: {error}") from error

    def save(
        self, engine: Engine, step: int, states: Mapping[str, Any] = MappingProxyType({}), kept_step: int | None = None
    ) -> float:
        """Begins a checkpoint of `engine` after `step` updates; returns the seconds for which training waited.

        First waits for the save before it, which is then not tried again. Does nothing for a step that it has saved, is
        saving or has resumed from.

        states: JSON-able, by name. This checkpoint's details have them beside those of all checkpoints.
        kept_step: the checkpoint after this step is not deleted.

        Raises InputError if the run folder is gone, ClaimedError if another job has taken it over; and OtherRankError
        on the other ranks.
        """
        began = time.monotonic()
        self.world.on_main(self.checkpoints.check_run_folder)
        if step == self._newest_step:
            return 0.0
        assert self._newest_step is None or step > self._newest_step, f"step {step} after step {self._newest_step}"
        self._no_more_attempts.set()
        self._settle()
        self._no_more_attempts.clear()
        details = json.loads(json.dumps({**self.details, **states}))  # a copy, since the caller may change its states
        save = _Save(step, staged(engine, self._staging_buffers), details, kept_step, began)
        self._newest_step = step
        log.info("saving %s", save.name)
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self.config.asynchronous:
            self._no_more_attempts.set()
            self.wait()
        return time.monotonic() - began

    def wait(self) -> None:
        """Collective: returns once the last save is complete; if it failed, raises CheckpointError on every rank.

        While the disk refuses it, the save is tried again until it succeeds or a rank is signalled to stop.
        """
        self._settle()
        self.last_error = self.world.on_main(lambda: self.last_error)
        if self.last_error:
            self._newest_step = None  # so that this step may be tried again
            raise CheckpointError(self.last_error)

    def close(self) -> None:
        """Ends the background thread. Not collective, since other ranks may be gone: waits CLOSE_GRACE_SECONDS for
        them, and not at all once some are known to be lost."""
        self._no_more_attempts.set()
        self._close_deadline = time.monotonic() + (0 if self.world.has_lost_ranks else CLOSE_GRACE_SECONDS)
        while self._is_saving(POLL_SECONDS):
            if self._is_receiving and time.monotonic() > self._close_deadline + 1:
                return  # the process that holds the store stands still, and its clients wait without end

    def _settle(self) -> None:
        """Collective: returns once no rank is saving any more. All ranks meet again and again meanwhile: a rank that
        died is noticed at once, and one that stands still after the process group's timeout."""
        while any(self.world.gather(self._is_saving(HEARTBEAT_SECONDS))):
            if any(self.world.gather(self.world.is_stop_signalled)):
                self._no_more_attempts.set()
        self._thread = None

    def _is_saving(self, wait_seconds: float) -> bool:
        if self._thread is not None:
            self._thread.join(wait_seconds)
        return self._thread is not None and self._thread.is_alive()

    # ---- In the background thread: steps 2 to 7 of a save ----

    def _run(self, save: _Save) -> None:
        """Tries to save for as long as rank 0 says so."""
        try:
            # The attempt's name is the same on every rank.
            while self._attempt(save, f"{save.name}.tmp-{self._token}-{next(self._attempt_numbers)}"):
                pass
        except Exception as error:  # rank 0 or its store is gone, or this run is being closed
            self.last_error = f"{save.name} could not be saved: {error}"
            log.error("%s. Earlier checkpoints are untouched", self.last_error)

    def _attempt(self, save: _Save, attempt: str) -> bool:
        """Writes this rank's files and, on rank 0, makes the checkpoint. Returns whether to try again."""
        rank = self.world.rank
        try:
            receipt = self.checkpoints.write(save.name, attempt, rank, save.pieces)
        except Exception as error:
            receipt = _failure(rank, error)
        if rank == 0:
            return self._conclude(save, attempt, receipt)
        self.last_error = receipt.get("error")
        if self.last_error:
            log.error("%s could not be saved: %s", save.name, self.last_error)
        self._send(f"{attempt}/{rank}", receipt)
        return self._receive(f"{attempt}/again", math.inf)

    def _conclude(self, save: _Save, attempt: str, receipt: dict[str, Any]) -> bool:
        """Rank 0: makes the checkpoint if no rank failed. Returns, and sends all ranks, whether to try again."""
        is_again = False
        try:
            receipts = [receipt, *self._receive_receipts(attempt)]
            failures = [receipt for receipt in receipts if "error" in receipt]
            try:
                if not failures:
                    self._publish(save, attempt, receipts)
            except Exception as error:
                failures = [_failure(0, error)]
            if failures:
                is_again = self._may_try_again(save, attempt, failures)
        finally:
            self._send(f"{attempt}/again", is_again)
        return is_again

    def _publish(self, save: _Save, attempt: str, receipts: list[dict[str, Any]]) -> None:
        """Turns all ranks' receipts into DONE and their files into a checkpoint, then deletes outdated checkpoints."""
        files = {name: record for receipt in receipts for name, record in receipt["files"].items()}
        tensors = merged([receipt["layout"] for receipt in receipts])
        done = {"format_version": FORMAT_VERSION, "step": save.step, "details": save.details, "files": files}
        self.checkpoints.publish(save.name, attempt, sealed(json.dumps({**done, "tensors": tensors})))
        try:
            for old in self._deletable(save, self.config.keep_last):
                self.checkpoints.delete(old)
        except OSError as error:
            log.warning("old checkpoints could not be deleted: %s", error)
        self.last_error = None
        size = tqdm.format_sizeof(sum(record["bytes"] for record in files.values()), "B")
        log.info("saved %s: %s in %.1f s", save.name, size, time.monotonic() - save.began)

    def _may_try_again(self, save: _Save, attempt: str, failures: list[dict[str, Any]]) -> bool:
        """Whether to try again. Unless it could make room, it waits RETRY_SECONDS before it says yes."""
        errors = [failure["error"] for failure in failures]
        if len(errors) > MOST_ERRORS_SHOWN:
            errors[MOST_ERRORS_SHOWN:] = [f"and {len(errors) - MOST_ERRORS_SHOWN} more ranks failed"]
        self.last_error = f"{save.name} could not be saved: {'; '.join(errors)}"
        checkpoints, folder = self.checkpoints, self.checkpoints.directory / attempt
        if folder.exists():
            remove(folder)
        numbers = {failure["errno"] for failure in failures}
        may_drop = self.config.on_full_disk == "drop_oldest" and checkpoints.is_shared and numbers <= _NO_ROOM
        if may_drop and (old := self._deletable(save, 1)):
            checkpoints.delete(old[0])
            log.warning("%s. Deleted %s to make room (checkpoint.on_full_disk)", self.last_error, old[0])
            return True
        if None in numbers or numbers & NEVER_PASSES or self._no_more_attempts.is_set():
            log.error("%s. Earlier checkpoints are untouched", self.last_error)
            return False
        room = str(checkpoints.directory)
        if not checkpoints.is_shared:
            room += f", and see that {checkpoints.place} can be written to"
        log.error(
            "%s. Earlier checkpoints are untouched. Make room in %s: this step is tried again in %.0f s and, where the "
            "run has no more steps, until it is saved or a stop signal comes",
            self.last_error,
            room,
            RETRY_SECONDS,
        )
        return not self._no_more_attempts.wait(RETRY_SECONDS)

    def _deletable(self, save: _Save, num_newest: int) -> list[str]:
        """The checkpoints, beside the newest ones, that do not stay for good, from the oldest on."""
        every = self.config.keep_every_steps
        names = self.checkpoints.names()[:-num_newest]
        return [n for n in names if step_of(n) != save.kept_step and not (every and step_of(n) % every == 0)]

    def _receive_receipts(self, attempt: str) -> list[dict[str, Any]]:
        """The other ranks' receipts. The ranks whose receipts did not come in time are one more failure."""
        receipts, silent, deadline = [], [], time.monotonic() + self.timeout_seconds
        for rank in range(1, self.world.size):
            try:
                receipts.append(self._receive(f"{attempt}/{rank}", deadline))
                self.world.store.delete_key(f"{attempt}/{rank}")
            except TimeoutError:
                silent.append(rank)
        if silent:
            receipts.append({"error": f"nothing came in time from ranks {silent}", "errno": None})
        return receipts

    def _send(self, key: str, value: Any) -> None:
        self.world.store.set(key, zlib.compress(json.dumps(value).encode()))  # the store takes at most 8 MiB

    def _receive(self, key: str, deadline: float) -> Any:
        """What another rank sent. TimeoutError if it does not come before the deadline, or in the grace of `close`."""
        self._is_receiving = True
        try:
            while not self.world.store.check([key]):
                if time.monotonic() > min(deadline, self._close_deadline):
                    raise TimeoutError(f"{key} did not come")
                time.sleep(POLL_SECONDS)
            return json.loads(zlib.decompress(self.world.store.get(key)))
        finally:
            self._is_receiving = False


def _failure(rank: int, error: Exception) -> dict[str, Any]:
    number = error.errno or errno.EIO if isinstance(error, OSError) else None  # a store's errors have no number
    return {"error": f"rank {rank}: {error!r}", "errno": number}
