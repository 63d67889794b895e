"""Measures the images per second and core of the loader, beside a plain torch DataLoader with the same transforms.

python benchmarks/images.py --config configs/images/gmlp_b.yaml

Both have the recipe's workers and micro-batches. A rate is images per second of CPU time of the process and its
workers, so other programs on the machine matter less. Our loader verifies the shards in its first epoch, so that epoch
is measured too. The script makes its own JPEG pictures of 500 x 375 pixels; each takes 0.2 MB of the temporary folder.
It prints JSON; only the ratios are worth quoting.
"""

import argparse
import io
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package that is installed has no benchmarks

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.reports import report_as_measured
from benchmarks.timing import time_in_turns
from gmlp_scale.checkpoint.trained import sha256_of
from gmlp_scale.data.augmentation import Augmentation
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.batch_plan import BatchPlan
from gmlp_scale.data.image_loader import ImageLoader
from gmlp_scale.data.image_shards import ImageManifest, StoredImage, pack_images
from gmlp_scale.data.manifest import MANIFEST_NAME, Shard, Splits
from gmlp_scale.distributed.logs import command
from gmlp_scale.options import count
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.reader import load_config
from gmlp_scale.storage.files import local_path, write_file, write_text
from gmlp_scale.tasks.images import ImagesConfig

IMAGE_SIZE = (500, 375)
"""Width and height, the commonest of ImageNet."""
JPEG_NOISE = 20
"""Standard deviation of the grey noise in the pictures: it gives a file 108 kB, about ImageNet's mean."""
NUM_PICTURES = 61
"""Different pictures; the other images repeat them."""
IMAGES_PER_SHARD = 128
"""As data_prep/prepare_images.py writes them."""


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a recipe with task: images")
    parser.add_argument(
        "--images", type=count, default=4096, help="a multiple of the micro-batch (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=count, default=5, help="turns of each loader (default: %(default)s)")
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="also write the report to this file")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="changes a field of the recipe")
    options = parser.parse_intermixed_args()
    run = load_config(ImagesConfig, options.config, options.overrides)
    size = run.train.micro_batch_size
    if options.images % size:
        parser.error(f"--images must be a multiple of train.micro_batch_size={size}")
    figures = measure_image_loading(run, options.images, options.rounds)
    report_as_measured("cpu", [{run.name: figures}], options.output)
    return 0


def measure_image_loading(run: ImagesConfig, num_images: int, num_rounds: int) -> dict:
    """Images per second and core of both loaders, medians of rounds in which they take turns, and their ratio.

    num_images: a multiple of the recipe's micro-batch.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_images(folder, num_images, run.model.vocab_size)
        num_steps = num_images // run.train.micro_batch_size

        def first_epoch() -> None:
            with closing(_ours(run, folder)) as new:
                deque(new.steps(0, num_steps), maxlen=0)

        with closing(_ours(run, folder)) as loader:
            epochs = {
                "gmlp_scale": lambda: deque(loader.steps(0, num_steps), maxlen=0),
                "gmlp_scale_first_epoch": first_epoch,
                "plain_dataloader": partial(deque, _plain(run, folder), maxlen=0),
            }
            turns = {name: partial(_cpu_seconds, epoch) for name, epoch in epochs.items()}
            seconds = time_in_turns(turns, num_rounds)
        num_bytes = sum(path.stat().st_size for path in folder.glob("shards/train/*"))
    rates = {name: num_images / spent for name, spent in seconds.items()}
    plain = rates["plain_dataloader"]
    return {
        "images": num_images,
        "shuffle_groups": num_bytes / run.data.shuffle_group_bytes,
        "workers": run.data.num_workers,
        "micro_batch_size": run.train.micro_batch_size,
        "images_per_core_second": rates,
        "ratios": {
            "over_plain_dataloader": rates["gmlp_scale"] / plain,
            "first_epoch_over_plain_dataloader": rates["gmlp_scale_first_epoch"] / plain,
        },
    }


def _write_images(folder: Path, num_images: int, num_classes: int) -> None:
    """The same pictures as shards and as files."""
    noise = np.random.default_rng(0)
    pictures = [_picture(noise) for _ in range(min(NUM_PICTURES, num_images))]
    # The number behind each picture makes every shard different. A decoder ignores it.
    files = (pictures[number % len(pictures)] + number.to_bytes(4, "big") for number in range(num_images))
    images = [StoredImage(file, number % num_classes) for number, file in enumerate(files)]
    for number, image in enumerate(images):
        (folder / f"{number:06d}.jpg").write_bytes(image.jpeg)
    splits: dict[str, list[Shard]] = {"train": [], "heldout": []}
    for split, stored in (("train", images), ("heldout", images[:1])):
        for first in range(0, len(stored), IMAGES_PER_SHARD):
            part = stored[first : first + IMAGES_PER_SHARD]
            path = folder / f"shards/{split}/{split}-{first:06d}.tar"
            write_file(path, pack_images(part))
            facts = {"rows": len(part), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
            splits[split].append(Shard(name=f"{split}/{path.name}", **facts))
    classes = tuple(map(str, range(num_classes)))
    listed = Splits(**splits)
    manifest = ImageManifest(classes=classes, total_rows=listed.total_rows, splits=listed)
    write_text(folder / "shards" / MANIFEST_NAME, manifest.to_json())


def _picture(noise: np.random.Generator) -> bytes:
    coarse = Image.fromarray(noise.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(IMAGE_SIZE, Image.Resampling.BICUBIC))
    pixels = smooth + noise.normal(0, JPEG_NOISE, (*smooth.shape[:2], 1))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def _ours(run: ImagesConfig, folder: Path) -> ImageLoader:
    micro_batch_size = run.train.micro_batch_size
    return ImageLoader(
        run.data.model_copy(update={"shards": str(folder / "shards"), "cache_dir": None}),
        run.augmentation,
        BatchPlan(seed=0, batch_sizes=Piecewise(micro_batch_size), micro_batch_size=micro_batch_size),
        image_size=run.image_size,
        num_classes=run.model.vocab_size,
    )


class _Files(Dataset):
    """Augmented images of a folder, as people write a Dataset."""

    def __init__(self, folder: Path, augmentation: Augmentation, num_classes: int):
        self.paths, self.augmentation, self.num_classes = sorted(folder.glob("*.jpg")), augmentation, num_classes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.augmentation.image(self.paths[index].read_bytes(), 0, index), index % self.num_classes


def _plain(run: ImagesConfig, folder: Path) -> DataLoader:
    augmentation, num_workers = Augmentation(run.augmentation, run.image_size, seed=0), run.data.num_workers

    def collated(samples: list[tuple[torch.Tensor, int]]) -> ImageBatch:
        images, labels = zip(*samples, strict=True)
        images_B3HW, labels_B = torch.stack(images), torch.tensor(labels)
        batch = ImageBatch(images_B3HW, labels_B, labels_B, torch.ones(len(samples)))
        return augmentation.mixed(batch, np.zeros(len(samples), np.int64), np.arange(len(samples)))

    return DataLoader(
        _Files(folder, augmentation, run.model.vocab_size),
        run.train.micro_batch_size,
        shuffle=True,
        collate_fn=collated,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )


def _cpu_seconds(call: Callable[[], None]) -> float:
    """The CPU time that a call takes in this process and in the workers that end within the call."""
    before = os.times()
    call()
    return sum(os.times()[:4]) - sum(before[:4])


if __name__ == "__main__":
    sys.exit(main())
