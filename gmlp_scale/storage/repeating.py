"""Repeats a call in a thread beside the main work, such as the one that shows how far the work is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(call: Callable[[], object], every_seconds: float) -> Iterator[None]:
    """Call `call` every so many seconds while the body runs."""
    ended = threading.Event()

    def repeat():
        while not ended.wait(every_seconds):
            call()

    thread = threading.Thread(target=repeat, name="repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
