"""Shows how far a job is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gmlp_scale.distributed.bars import progress_bar
from gmlp_scale.storage.repeating import repeating


@contextmanager
def job_progress(description: str, total_bytes: int, read_progress: Callable[[], list[dict]]) -> Iterator[None]:
    """Show the sum of the tasks' progress while the body runs: in stored bytes of the input, or, where `total_bytes`
    is 0, in documents."""
    key, unit = ("bytes_read", "B") if total_bytes else ("documents", "doc")

    def show():
        tasks = read_progress()
        bar.n = sum(task.get(key, 0) for task in tasks)
        bar.set_postfix_str(f"{sum(task.get('documents', 0) for task in tasks):,} documents")

    with progress_bar(desc=description, total=total_bytes or None, unit=unit, unit_scale=True, smoothing=0.05) as bar:
        try:
            with repeating(show, every_seconds=1.0):
                yield
        finally:
            show()
