"""Small real images, and shards of them as data_prep writes them."""

import io
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import prepare_images
from gmlp_scale.data.image_shards import ImageManifest, StoredImage, unpack_images

CLASSES = ("ant", "bee", "cat")


def write_image_folder(folder: Path, num_per_class: int = 8, size: tuple[int, int] = (20, 16)) -> Path:
    """JPEG files FOLDER/CLASS/NUMBER.jpg. A class has a colour, and each file its own noise."""
    noise = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(num_per_class):
            pixels = noise.integers(0, 60, (size[1], size[0], 3))
            pixels[:, :, label] += 180
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.jpg", quality=95)
    return folder


def tar_of_folder(source: Path, target: Path) -> Path:
    """A tar file of class folders."""
    with tarfile.open(target, "w") as tar:
        tar.add(source, arcname="photos")
    return target


def tar_of_tars(source: Path, target: Path) -> Path:
    """As ImageNet's training images come: CLASS.tar for each class."""
    with tarfile.open(target, "w") as tar:
        for name in CLASSES:
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as class_tar:
                for path in sorted((source / name).iterdir()):
                    class_tar.add(path, arcname=f"{name}_{path.name}")
            member = tarfile.TarInfo(f"{name}.tar")
            member.size = inner.tell()
            inner.seek(0)
            tar.addfile(member, inner)
    return target


def prepare(*arguments: object) -> int:
    """Runs data_prep/prepare_images.py in this process; returns its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare_images.py", *map(str, arguments)])
        return prepare_images.main()


def write_image_shards(folder: Path) -> Path:
    """18 training and 6 held-out images in shards of 5."""
    source, shards = write_image_folder(folder / "photos"), folder / "shards"
    prepare("--input", source, "--heldout-fraction", 0.25, "--output", shards, "--images-per-shard", 5)
    return shards


def stored_images(shards: Path) -> dict[str, list[StoredImage]]:
    """All images of a folder of shards, by split, in their order."""
    manifest = ImageManifest.load(shards)
    return {
        split: [
            image
            for shard in getattr(manifest.splits, split)
            for image in unpack_images((shards / shard.name).read_bytes(), shard, len(manifest.classes))
        ]
        for split in ("train", "heldout")
    }
