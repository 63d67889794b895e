"""Finds the ranks that are gone when a collective fails: those that still run answer through the launcher's store.

A collective on GPUs does not fail when a rank is lost. So every rank has a beat in the store, and each looks at the
beat of the next one.
"""

import threading
import time
from collections.abc import Sequence

POLL_SECONDS = 1.0
ANSWER_SECONDS = 3.5
"""How long the other ranks have to answer: a thread of each asks the store every POLL_SECONDS."""
SILENT_SECONDS = 8.0
"""How long a rank may be without a beat before its neighbour raises the alarm."""
NUM_NAMED = 8


def shortened(names: Sequence[str]) -> str:
    """The first NUM_NAMED names, and how many more there are."""
    return ", ".join(names if len(names) <= NUM_NAMED else [*names[:NUM_NAMED], f"{len(names) - NUM_NAMED} more"])


class RollCall:
    """One rank's part: a thread answers for it, also while its main thread waits in a collective.

    store: this rank's client of the key-value store that all ranks share, a torch.distributed.Store.
    hosts: the name of each rank's host.
    doing: what the rank does now, such as "the norm of step 7". Its main thread keeps it up to date.
    """

    def __init__(self, store, rank: int, hosts: list[str]):
        self.rank, self.hosts, self.doing = rank, hosts, "the start of the run"
        self.failure = ""
        """Why this rank ends. Its main thread sets it, and the other ranks learn it."""
        self._store = store
        self._answered_at: float | None = None  # when this rank answered a call
        self._heard_at = 0.0  # when the store last answered
        self._is_alarmed, self._beat_at = False, time.monotonic()
        self.has_missed, self._is_store_gone = False, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, args=(store.clone(),), daemon=True)
        self._thread.start()

    @property
    def is_alarmed(self) -> bool:
        """Whether a rank or the store has been silent for too long, or a rank has failed or has called the others."""
        return self._is_alarmed or time.monotonic() - self._beat_at > SILENT_SECONDS

    def describe_missing(self) -> str:
        """Which ranks do not answer, and what the others were doing."""
        self.has_missed = True
        heard: list[tuple[dict[int, str], list[str]]] = []
        # In a thread of its own: if the link to the store is cut, a client waits for its answer for ever.
        asking = threading.Thread(target=self._ask, args=(heard,), daemon=True)
        self._heard_at = time.monotonic()
        asking.start()
        while asking.is_alive() and time.monotonic() < self._heard_at + ANSWER_SECONDS + 0.25:
            asking.join(0.05)
        self._is_store_gone = not heard
        if self._is_store_gone:
            return f"{self._store_is_gone()}; rank {self.rank} waited in {self.doing}"
        present, failures = heard[0]
        if failures:
            return f"{'; '.join(failures[:NUM_NAMED])}; rank {self.rank} waited in {self.doing}"
        missing = [f"rank {rank} (host {host})" for rank, host in enumerate(self.hosts) if rank not in present]
        if not missing:
            places = sorted(f"rank {rank} in {doing}" for rank, doing in present.items())[:NUM_NAMED]
            return f"all ranks answer, so a connection between them was cut; they waited: {', '.join(places)}"
        verb = "do" if len(missing) > 1 else "does"
        return f"{shortened(missing)} {verb} not answer; rank {self.rank} waited in {self.doing}"

    def _store_is_gone(self) -> str:
        host = self.hosts[0]
        beside = [f"rank {rank}" for rank, other in enumerate(self.hosts) if other == host and rank]
        too = f" (and with host {host} perhaps {', '.join(beside[:NUM_NAMED])})" if beside else ""
        return f"rank 0 (host {host}) or its launcher, which hold the ranks' key-value store, is gone or cut off{too}"

    def _ask(self, heard: list[tuple[dict[int, str], list[str]]]) -> None:
        """Adds to `heard` what each rank that answers was doing, and why ranks failed. Nothing if the store is gone."""
        present, failures = {self.rank: self.doing}, []
        # Another rank may have called first and then left. All ranks have had their time since its call.
        deadline = (self._answered_at or time.monotonic()) + ANSWER_SECONDS
        is_over = False
        try:
            self._store.set("roll_call", "")
            while len(present) < len(self.hosts) and not is_over and not failures:
                is_over = time.monotonic() > deadline
                time.sleep(0.1)
                if self._store.check(["present"]):
                    lines = self._store.get("present").decode().splitlines()
                    present |= {int(rank): doing for rank, doing in (line.split(" ", 1) for line in lines)}
                if self._store.check(["failed"]):
                    failures = self._store.get("failed").decode().splitlines()
                self._heard_at = time.monotonic()
        except RuntimeError:
            return
        heard.append((present, failures))

    def _answer(self, store) -> None:
        neighbour, last_beat, last_at = (self.rank + 1) % len(self.hosts), -1, time.monotonic()
        try:
            while not self._ended.wait(POLL_SECONDS) and not self.failure:
                if store.check(["roll_call"]):
                    store.append("present", f"{self.rank} {self.doing}\n")
                    self._answered_at = time.monotonic()
                    self._is_alarmed = True
                    return
                store.add(f"beat {self.rank}", 1)
                beat = store.add(f"beat {neighbour}", 0)
                self._beat_at = time.monotonic()
                if beat != last_beat:
                    last_beat, last_at = beat, self._beat_at
                self._is_alarmed = self._beat_at - last_at > SILENT_SECONDS
            if self.failure:
                store.append("failed", f"{self.failure}\n")
                store.set("roll_call", "")
        except RuntimeError:
            self._is_alarmed = True  # the store has gone with its host: the main thread meets that too

    def end(self) -> None:
        """Waits for the thread, which must not outlive the interpreter, unless it waits for a store that is gone."""
        self._ended.set()
        if not self._is_store_gone:
            self._thread.join(2 * POLL_SECONDS)
