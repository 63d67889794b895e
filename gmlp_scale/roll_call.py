"""Finds the ranks that are gone when a collective fails: those that still run answer through the launcher's store."""

import socket
import threading
import time

POLL_SECONDS = 1.0
ANSWER_SECONDS = 4.0
"""How long the other ranks have to answer: a thread of each asks the store every POLL_SECONDS."""
NUM_NAMED = 8


class RollCall:
    """One rank's part: a thread answers for it, also while its main thread waits in a collective.

    store: this rank's client of the key-value store that all ranks share, a torch.distributed.Store.
    doing: what the rank does now, as "the norm of step 7". Its main thread keeps it up to date.
    """

    def __init__(self, store, rank: int, size: int):
        self.rank, self.size, self.doing = rank, size, "the start of the run"
        self._store = store
        self._store.set(f"host/{rank}", socket.gethostname())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, args=(store.clone(),), daemon=True)
        self._thread.start()

    def describe_missing(self) -> str:
        """Which ranks do not answer, and what the others were doing."""
        try:
            self._store.set("roll_call", "")
            present = self._wait_for_answers()
            missing = [rank for rank in range(self.size) if rank not in present]
            names = [f"rank {rank} (host {self._store.get(f'host/{rank}').decode()})" for rank in missing[:NUM_NAMED]]
        except RuntimeError:
            gone = "rank 0 or its launcher, which hold the ranks' key-value store, is gone"
            return f"{gone}; rank {self.rank} waited in {self.doing}"
        if len(missing) > NUM_NAMED:
            names.append(f"{len(missing) - NUM_NAMED} more")
        if not missing:
            places = sorted(f"rank {rank} in {doing}" for rank, doing in present.items())[:NUM_NAMED]
            return f"all ranks answer, so a connection between them was cut; they waited: {', '.join(places)}"
        verb = "do" if len(missing) > 1 else "does"
        return f"{', '.join(names)} {verb} not answer; rank {self.rank} waited in {self.doing}"

    def _wait_for_answers(self) -> dict[int, str]:
        deadline = time.monotonic() + ANSWER_SECONDS
        present = {self.rank: self.doing}
        while len(present) < self.size and time.monotonic() < deadline:
            time.sleep(0.1)
            if self._store.check(["present"]):
                lines = self._store.get("present").decode().splitlines()
                present |= {int(rank): doing for rank, doing in (line.split(" ", 1) for line in lines)}
        return present

    def _answer(self, store) -> None:
        try:
            while not self._ended.wait(POLL_SECONDS):
                if store.check(["roll_call"]):
                    store.append("present", f"{self.rank} {self.doing}\n")
                    return
        except RuntimeError:
            return  # the store has gone with its host: the main thread meets that too

    def end(self) -> None:
        """Waits for the thread, which must not outlive the interpreter."""
        self._ended.set()
        self._thread.join(2 * POLL_SECONDS)
