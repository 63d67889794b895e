"""Where the time from the start of a process to the end of its first step goes."""

import time


class StartUp:
    """A clock that is told when each part of the start is over.

    since: when the first part began, in seconds of time.perf_counter().
    """

    def __init__(self, since: float):
        self._part_began = since
        self.seconds: dict[str, float] = {}
        """By part, in the order in which they first ended."""

    def finish(self, part: str) -> None:
        """Adds the time since the last call to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._part_began
        self._part_began = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"
