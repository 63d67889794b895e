"""The batches of images: for each step the rank's rows, decoded and augmented by worker processes some steps ahead."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.utils.data import Dataset

from gmlp_scale.data.augmentation import Augmentation, AugmentationConfig, centre_crop
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.image_shards import ImageManifest, ImageShards
from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError
from gmlp_scale.data.order import RowOrder, first_rows, places_in_shards
from gmlp_scale.data.workers import made_ahead
from gmlp_scale.fields import FreeOnResume, OfOneMachine


class ImageDataConfig(BaseModel, frozen=True, extra="forbid"):
    shards: FreeOnResume[str]
    """Folder that data_prep/prepare_images.py wrote: a path or a URL that fsspec opens."""
    cache_dir: OfOneMachine[str | None] = None
    """Local folder that shards are copied to when they are first read; a URL needs one."""
    shuffle_group_bytes: int = Field(200_000_000, ge=1)
    """Rows are shuffled within groups of shards of about this size. [bytes]"""
    num_workers: FreeOnResume[int] = Field(8, ge=0)
    """Processes of each rank that decode; 0 decodes between the steps. [processes]"""
    prefetch_batches: FreeOnResume[int] = Field(4, ge=1)
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
        self.manifest = ImageManifest.load(config.shards)
        check_images_fit(self.manifest, config.shards, num_classes)
        self.wait_seconds = 0.0
        """How long the caller of `steps` has waited for batches so far."""
        self._config, self._augmentation, self._plan = config, augmentation, plan
        self._image_size = image_size
        files, splits = ShardFiles(config.shards, config.cache_dir), self.manifest.splits
        self._order = RowOrder.of_shards(splits.train, group_bytes=config.shuffle_group_bytes, seed=plan.seed)
        # The rows of one step may be of two groups.
        self._train = ImageShards(files, splits.train, num_classes, num_open=self._order.shards_per_group + 8)
        self._heldout = ImageShards(files, splits.heldout, num_classes, num_open=1)

    def steps(self, start_step: int, stop_step: int) -> Iterator[list[ImageBatch]]:
        """The micro-batches of each step of [start_step, stop_step)."""
        augmentation = Augmentation(self._augmentation, self._image_size, self._plan.seed)
        rows = _TrainingRows(self._train, self._order, augmentation)
        keys = (positions for step in range(start_step, stop_step) for positions in self._plan.micro_batches(step))
        batches = self._loaded(rows, keys)
        for step in range(start_step, stop_step):
            started = time.perf_counter()
            micro_batches = [next(batches) for _ in self._plan.micro_batches(step)]
            self.wait_seconds += time.perf_counter() - started
            yield micro_batches

    def heldout_batches(self, num_rows: int) -> Iterator[tuple[ImageBatch, int]]:
        """This rank's share of the first `num_rows` held-out images, and how many images of each batch count.

        Every rank has the same number of batches; the images that fill up the last ones do not count.
        """
        num_rows = min(num_rows, self.manifest.num_rows("heldout"))
        places = self._plan.heldout(num_rows)
        rows = _HeldoutRows(self._heldout, self.manifest.splits.heldout, self._image_size)
        for batch, wanted in zip(self._loaded(rows, places), places, strict=True):
            yield batch, int((wanted < num_rows).sum())

    def fingerprint(self) -> dict[str, str | int | list[str]]:
        """Facts of the data that a resumed run must find again."""
        rows = {f"{split}_rows": self.manifest.num_rows(split) for split in ("train", "heldout")}
        return {"manifest_sha256": self.manifest.sha256, "classes": list(self.manifest.classes), **rows}

    def close(self) -> None:
        """Closes the shards. The workers end with the iterator of `steps`."""
        self._train.close()
        self._heldout.close()

    def _loaded(self, rows: Dataset, keys: Iterable[np.ndarray]) -> Iterator[ImageBatch]:
        """The batches in order, made ahead by the workers. Raises the error that a worker had with a shard or store."""
        workers = {"num_workers": self._config.num_workers, "prefetch_batches": self._config.prefetch_batches}
        with closing(made_ahead(rows, keys, **workers)) as batches:  # an error's traceback would keep the workers
            for batch in batches:
                if isinstance(batch, _FAILURES):
                    raise batch
                yield batch


_FAILURES = (CorruptShardError, OSError)
"""A worker returns these errors as values, since the DataLoader would pass on the text alone of an error raised."""


class _TrainingRows(Dataset):
    """Augmented micro-batches, by their rows' positions in the order."""

    def __init__(self, shards: ImageShards, order: RowOrder, augmentation: Augmentation):
        self._shards, self._order, self._augmentation = shards, order, augmentation

    def __getitem__(self, positions_B: np.ndarray) -> ImageBatch | Exception:
        rows = self._order.locate(positions_B)
        try:
            stored = [self._shards.read(*row) for row in zip(rows.shard.tolist(), rows.row_index.tolist(), strict=True)]
        except _FAILURES as error:
            return error
        keys = zip(rows.epoch.tolist(), rows.global_row_index.tolist(), strict=True)
        images = [self._augmentation.image(image.jpeg, *key) for image, key in zip(stored, keys, strict=True)]
        batch = _batch(images, [image.label for image in stored])
        return self._augmentation.mixed(batch, rows.epoch, rows.global_row_index)


class _HeldoutRows(Dataset):
    """Micro-batches of the images' centres, by the images' numbers in the split. A number beyond the last one gives
    the first image."""

    def __init__(self, shards: ImageShards, listed: Sequence[Shard], image_size: int):
        self._shards, self._image_size = shards, image_size
        self._first_rows = first_rows(listed)

    def __getitem__(self, rows_B: np.ndarray) -> ImageBatch | Exception:
        rows_B = np.where(rows_B < self._first_rows[-1], rows_B, 0)
        shards_B, within_B = places_in_shards(self._first_rows, rows_B)
        try:
            stored = [self._shards.read(*row) for row in zip(shards_B.tolist(), within_B.tolist(), strict=True)]
        except _FAILURES as error:
            return error
        images = [centre_crop(image.jpeg, self._image_size) for image in stored]
        return _batch(images, [image.label for image in stored])


def _batch(images: list[Tensor], labels: list[int]) -> ImageBatch:
    labels_B = torch.tensor(labels)
    return ImageBatch(torch.stack(images), labels_B, labels_B, torch.ones(len(labels)))


def check_images_fit(manifest: ImageManifest, folder: str, num_classes: int) -> None:
    """Raises ShardError if the shards do not fit a recipe with so many classes."""
    found = len(manifest.classes)
    mistakes = [f"model.vocab_size is {num_classes}, the shards have {found} classes"] if found != num_classes else []
    mistakes += [f"the shards have no {split} images" for split, rows in manifest.total_rows.items() if not rows]
    if mistakes:
        raise ShardError(
            f"the shards at {folder} do not fit the recipe: {'; '.join(mistakes)}. Change the recipe, or write other "
            "shards with data_prep/prepare_images.py"
        )
