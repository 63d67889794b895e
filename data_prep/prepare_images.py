"""Writes images with classes as shards that webdataset's users know: .jpg and .cls members, checksums in a manifest.

python data_prep/prepare_images.py --input ILSVRC2012_img_train.tar --heldout imagenet/val --output SHARDS_DIR
python data_prep/prepare_images.py --input photos --heldout-fraction 0.1 --output SHARDS_DIR --workers 8
python data_prep/prepare_images.py --input t10k-images-idx3-ubyte.gz --heldout-fraction 0.2 --output SHARDS_DIR

A source is a folder or a tar file of class folders or, as ImageNet's, of a tar file for each class, a Parquet file or a
folder of them (columns image and label), or an IDX file of images with its file of labels beside it. The images of
all but Parquet are shuffled. A job that was killed at any point goes on when the same command is run again, and writes
the same bytes as one that was never disturbed. It reads the shards that are there, and writes the missing and the
damaged ones again (checksums of 150 GB: 200 s on a core, besides the reading). The manifest is written last.
"""

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import as_completed
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import Field, ValidationError

from gmlp_scale.data.hashing import permutation
from gmlp_scale.data.image_shards import ImageManifest, StoredImage, pack_images
from gmlp_scale.data.manifest import MANIFEST_NAME, Shard, Splits
from gmlp_scale.distributed.logs import command, progress_bar
from gmlp_scale.errors import InputError
from gmlp_scale.options import count, count_from_0, option
from gmlp_scale.prepare.image_sources import BadImageError, ImageRef, ImageSource, as_jpeg, open_source
from gmlp_scale.prepare.job import JobFolder, pool_of_workers
from gmlp_scale.storage.files import plain_place, read_file, write_file, write_text

_ORDER_SEED = 0
_BAD_IMAGES_SHOWN = 3


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--input", required=True, metavar="SOURCE", help="the training images")
    heldout = parser.add_mutually_exclusive_group(required=True)
    heldout.add_argument("--heldout", metavar="SOURCE", help="the images to evaluate on, of the same classes")
    heldout.add_argument(
        "--heldout-fraction",
        type=option(Annotated[float, Field(gt=0, lt=1)]),
        help="of the images of --input, chosen by chance",
    )
    add(
        "--output",
        type=plain_place,
        required=True,
        metavar="SHARDS_DIR",
        help="a path or a URL: new, or of the same job",
    )
    add("--images-per-shard", type=count, default=128, help=default)
    add("--max-bad-images", type=count_from_0, default=0, help=f"that may be left out {default}")
    add("--workers", type=count, default=1, help=f"processes {default}")
    options = parser.parse_args()
    splits = _splits(options)
    listed = [tuple(ref) for source in splits.values() for ref in source.images]
    settings = {name: getattr(options, name) for name in ("input", "heldout", "heldout_fraction", "images_per_shard")}
    job = JobFolder(options.output)
    with job.begun(settings | {"images": xxhash.xxh3_128_hexdigest(repr(listed).encode())}):
        return _run(options, splits, job)


def _splits(options: argparse.Namespace) -> dict[str, ImageSource]:
    """The images of each split, in the order in which they are stored."""
    if options.heldout and Path(options.heldout).resolve() == Path(options.input).resolve():
        raise InputError("--heldout is --input: give other images, or --heldout-fraction")
    source = open_source(options.input)
    order = permutation(len(source.images), _ORDER_SEED)
    if options.heldout:
        heldout = open_source(options.heldout).with_classes(source.classes)
        heldout = heldout.chosen(permutation(len(heldout.images), _ORDER_SEED))
        return {"train": source.chosen(order), "heldout": heldout}
    num_train = len(order) - round(options.heldout_fraction * len(order))
    if not 0 < num_train < len(order):
        raise InputError(f"--heldout-fraction leaves {num_train} of {len(order)} images to train on")
    return {"train": source.chosen(order[:num_train]), "heldout": source.chosen(order[num_train:])}


def _run(options: argparse.Namespace, splits: dict[str, ImageSource], job: JobFolder) -> int:
    """Writes the shards that are not whole, and the manifest, if all is well. Returns the exit code."""
    planned = []
    for split, source in splits.items():
        for number, first in enumerate(range(0, len(source.images), options.images_per_shard)):
            name = f"{split}/{split}-{number:06d}.tar"
            planned.append((name, source.images[first : first + options.images_per_shard], source.read))
    receipts = {receipt["name"]: receipt for receipt in job.read_all("receipts")}
    try:
        with pool_of_workers(options.workers, multiprocessing.get_context("fork")) as pool:
            shards = [pool.submit(_whole_shard, options.output, receipts.get(plan[0]), *plan) for plan in planned]
            for shard in progress_bar(as_completed(shards), desc="shards", total=len(shards)):
                receipt = shard.result()
                if receipt != receipts.get(receipt["name"]):
                    job.write(f"receipts/{receipt['name'].replace('/', '-')}.json", receipt)
                    receipts[receipt["name"]] = receipt
        manifest = _manifest([receipts[name] for name, *_ in planned], splits["train"].classes, options.max_bad_images)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the shards that are not written", file=sys.stderr)
        return 130
    job.remove_leftovers()
    write_text(f"{options.output}/{MANIFEST_NAME}", manifest.to_json())
    rows = manifest.total_rows
    print(f"{rows['train']:,} train and {rows['heldout']:,} held-out images of {len(manifest.classes):,} classes")
    return 0


def _whole_shard(
    output: str, receipt: dict | None, name: str, refs: list[ImageRef], read: Callable[[ImageRef], bytes]
) -> dict:
    """Returns a shard's receipt: the one that is there if its checksum holds, else that of the shard written anew."""
    with suppress(FileNotFoundError):
        if receipt and hashlib.sha256(read_file(f"{output}/{name}")).hexdigest() == receipt["sha256"]:
            return receipt
    images, bad = [], []
    for ref in refs:
        try:
            images.append(StoredImage(as_jpeg(read(ref)), ref.label))
        except BadImageError as error:
            bad.append(f"{ref.path} at {ref.place}: {error}")
    content = pack_images(images)
    write_file(f"{output}/{name}", content)
    sha256 = hashlib.sha256(content).hexdigest()
    return {"name": name, "rows": len(images), "bytes": len(content), "sha256": sha256, "bad": bad}


def _manifest(receipts: list[dict], classes: tuple[str, ...], max_bad_images: int) -> ImageManifest:
    """Raises InputError if more images are bad than may be left out, or if the shards make no manifest."""
    bad = [line for receipt in receipts for line in receipt["bad"]]
    if len(bad) > max_bad_images:
        shown = "\n".join(f"  {line}" for line in bad[:_BAD_IMAGES_SHOWN])
        raise InputError(
            f"{len(bad)} images cannot be decoded:\n{shown}\nmend them and write to a new folder, or run the same "
            f"command with --max-bad-images {len(bad)}, which leaves them out"
        )
    shards = {"train": [], "heldout": []}
    for receipt in receipts:
        if receipt["rows"]:
            fields = {name: receipt[name] for name in ("name", "rows", "bytes", "sha256")}
            shards[receipt["name"].partition("/")[0]].append(Shard(**fields))
    splits = Splits(**shards)
    try:
        return ImageManifest(classes=classes, total_rows=splits.total_rows, splits=splits)
    except ValidationError as error:
        raise InputError(
            f"these shards cannot be trained on: {error.errors()[0]['ctx']['error']}. Give held-out images other than "
            "the training images, and classes of different names"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
