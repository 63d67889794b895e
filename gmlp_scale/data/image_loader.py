"""The batches of images: for each step the rank's rows, decoded and augmented by worker processes some steps ahead."""

import errno
import os
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gmlp_scale.data.augmentation import Augmentation, AugmentationConfig, centre_crop
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.image_shards import ImageManifest, ImageShards, StoredImage
from gmlp_scale.data.manifest import CorruptShardError, ShardError, ShardFiles
from gmlp_scale.data.order import RowOrder
from gmlp_scale.distributed.process import STOP_SIGNALS
from gmlp_scale.errors import UserError
from gmlp_scale.fields import Count, CountFrom0, FreeOnResume, OfOneMachine
from gmlp_scale.storage.files import Place, print_error

_FAILURES = (CorruptShardError, OSError)
"""A worker returns these errors as values, since the DataLoader would pass on the text alone of an error raised."""


class _Made(Dataset):
    """make(key) by key; an error of a shard or a store as a value."""

    def __init__(self, make: Callable[[Any], Any]):
        self._make = make

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._make(key)
        except _FAILURES as error:
            return error


def made_ahead(
    make: Callable[[Any], Any], keys: Iterable, *, num_workers: int, prefetch_batches: int
) -> Generator[Any, None, None]:
    """make(key) of each key, in order. Each worker makes `prefetch_batches` ahead; without workers, none is.

    Stop signals are for the run alone: workers go on until the iterator is closed or their parent is gone.
    Raises UserError if a worker is killed, and the error that `make` has with a shard or a store.
    """
    loader = DataLoader(
        _Made(make),
        sampler=keys,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,  # the workers share what is imported
        prefetch_factor=prefetch_batches if num_workers else None,
        worker_init_fn=_set_up_worker,
        generator=torch.Generator(),  # else the DataLoader would draw from the one that dropout uses
    )
    others, failure = active_children(), None
    with _our_signals():
        batches = iter(loader)
    workers = [child for child in active_children() if child not in others]
    try:
        for batch in batches:
            if isinstance(batch, _FAILURES):
                failure = batch
                break
            yield batch
    except Exception as error:
        # torch may raise before it knows why: the connection to a killed worker breaks first.
        ended = wait([worker.sentinel for worker in workers], timeout=1) if workers else []
        if not ended:
            raise
        (code, *_) = [worker.exitcode for worker in workers if worker.sentinel in ended]
        raise UserError(
            f"a process that decodes images ended with exit code {code}; -9 is a kill, mostly for want of memory, "
            f"{errno.ENOSPC} and -7 are a full /dev/shm. Lower data.num_workers (--workers of an evaluation) or "
            "data.prefetch_batches, or give the job more memory, or docker run a larger --shm-size"
        ) from error
    if failure:
        del batches, loader  # the error's traceback would keep them, and so the workers
        raise failure


@contextmanager
def _our_signals() -> Iterator[None]:
    """Start workers within it: they inherit that stop signals are blocked, and torch's SIGCHLD handler is undone.

    That handler raises wherever the main thread is when a worker dies, even within a save. Without it torch notices the
    death when it waits for the worker, within 5 s.
    """
    on_child = signal.getsignal(signal.SIGCHLD)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if signal.getsignal(signal.SIGCHLD) != on_child:
            signal.signal(signal.SIGCHLD, on_child)


def _set_up_worker(worker: int) -> None:
    Queue._on_queue_feeder_error = staticmethod(_end_for_lack_of_room)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_for_lack_of_room(error: Exception, batch: object) -> None:
    """A batch that shared memory has no room for. The queue would drop it, and its reader wait for it without end."""
    try:
        print_error(f"a batch of images cannot be handed over: {error}")
    finally:
        os._exit(errno.ENOSPC)


def _end_with_parent() -> None:
    """Ends this process when its parent sends SIGTERM, as it does to workers that are left when it exits."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != os.getppid():
        pass
    os._exit(0)


class ImageDataConfig(BaseModel, frozen=True, extra="forbid"):
    shards: FreeOnResume[Place[str]]
    """Folder that data_prep/prepare_images.py wrote: a path or a URL that fsspec opens."""
    cache_dir: OfOneMachine[Place[str | None]] = None
    """Local folder that shards are copied to when they are first read; a URL needs one."""
    shuffle_group_bytes: Count = 200_000_000
    """Rows are shuffled within groups of shards of about this size. [bytes]"""
    num_workers: FreeOnResume[CountFrom0] = 8
    """Processes of each rank that decode; 0 decodes between the steps. [processes]"""
    prefetch_batches: FreeOnResume[Count] = 4
    """Micro-batches that each worker makes ahead. [micro-batches]"""


class ImageLoader:
    """The batches of a run for one rank, as its plan says.

    Raises ShardError if the shards do not fit the recipe, FileNotFoundError if there are none.
    """

    def __init__(
        self,
        config: ImageDataConfig,
        augmentation: AugmentationConfig,
        plan: BatchPlan,
        *,
        image_size: int,
        num_classes: int,
    ):
        self.manifest = load_image_manifest(config.shards, num_classes)
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self._augmentation, self._plan, self._image_size = augmentation, plan, image_size
        files, splits = ShardFiles(config.shards, config.cache_dir), self.manifest.splits
        self._order = RowOrder.of_shards(splits.train, group_bytes=config.shuffle_group_bytes, seed=plan.seed)
        # The rows of one step may be of two groups.
        self._train = ImageShards(files, splits.train, num_classes, num_open=self._order.shards_per_group + 8)
        self._heldout = ImageShards(files, splits.heldout, num_classes, num_open=1)
        self._made_ahead = partial(made_ahead, num_workers=config.num_workers, prefetch_batches=config.prefetch_batches)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[ImageBatch]]:
        """The micro-batches of each step of [start_step, stop_step)."""
        augmentation = Augmentation(self._augmentation, self._image_size, self._plan.seed)
        positions = (own for step in range(start_step, stop_step) for own in self._plan.micro_batches(step))
        with closing(self._made_ahead(partial(self._augmented, augmentation), positions)) as batches:
            for step in range(start_step, stop_step):
                started = time.perf_counter()
                micro_batches = [next(batches) for _ in self._plan.micro_batches(step)]
                self.wait_seconds += time.perf_counter() - started
                yield micro_batches

    def heldout_batches(self, num_rows: int) -> Iterator[tuple[ImageBatch, int]]:
        """This rank's share of the first `num_rows` held-out images, and how many images of each batch count.

        Every rank has the same number of batches; the images that fill up the last ones do not count.
        """
        num_stored = self.manifest.num_rows("heldout")
        num_rows = min(num_rows, num_stored)
        wanted = self._plan.heldout(num_rows)
        filled = [np.where(rows < num_stored, rows, 0) for rows in wanted]
        with closing(self._made_ahead(self._centres, filled)) as batches:
            for batch, rows in zip(batches, wanted, strict=True):
                yield batch, int((rows < num_rows).sum())

    def fingerprint(self) -> dict[str, str | int | list[str]]:
        """Facts of the data that a resumed run must find again."""
        rows = {f"{split}_rows": self.manifest.num_rows(split) for split in ("train", "heldout")}
        return {"manifest_sha256": self.manifest.sha256, "classes": list(self.manifest.classes), **rows}

    def close(self) -> None:
        """Closes the shards. The workers end with the iterator of `steps`."""
        self._train.close()
        self._heldout.close()

    def _augmented(self, augmentation: Augmentation, positions_B: np.ndarray) -> ImageBatch:
        """Training images by their positions in the order."""
        rows = self._order.locate(positions_B)
        stored = self._train.read(rows.shard, rows.row_index)
        keys = zip(rows.epoch.tolist(), rows.global_row_index.tolist(), strict=True)
        images = [augmentation.image(image.jpeg, *key) for image, key in zip(stored, keys, strict=True)]
        return augmentation.mixed(_batch(images, stored), rows.epoch, rows.global_row_index)

    def _centres(self, rows_B: np.ndarray) -> ImageBatch:
        """The centres of held-out images, by their numbers in the split."""
        stored = self._heldout.read(*self._heldout.places(rows_B))
        return _batch([centre_crop(image.jpeg, self._image_size) for image in stored], stored)


def _batch(images: list[Tensor], stored: list[StoredImage]) -> ImageBatch:
    labels_B = torch.tensor([image.label for image in stored])
    return ImageBatch(torch.stack(images), labels_B, labels_B, torch.ones(len(stored)))


def load_image_manifest(folder: str, num_classes: int) -> ImageManifest:
    """Raises ShardError if the shards do not fit a recipe with `num_classes` classes."""
    manifest = ImageManifest.load(folder)
    found = len(manifest.classes)
    mistakes = [f"model.vocab_size is {num_classes}, the shards have {found} classes"] if found != num_classes else []
    mistakes += [f"the shards have no {split} images" for split, rows in manifest.total_rows.items() if not rows]
    if mistakes:
        raise ShardError(
            f"the shards at {folder} do not fit the recipe: {'; '.join(mistakes)}. Change the recipe, or write other "
            "shards with data_prep/prepare_images.py"
        )
    return manifest
