"""Checks a folder of shards against its manifest: checksums, names and counts.

Of text it also checks token ids and the tokenizer; of images, that each can be decoded.

python data_prep/verify_shards.py SHARDS_DIR

The exit code is 0 if all is well, 1 if a shard or the tokenizer is bad (each is named), 2 without a valid manifest.
"""

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from gmlp_scale.data.image_shards import ImageManifest, unpack_images
from gmlp_scale.data.manifest import MANIFEST_NAME, CorruptShardError, Shard, ShardFiles, read_verified
from gmlp_scale.data.shards import Manifest, ShardRows
from gmlp_scale.data.tokenizer import JSON_NAME, MODEL_NAME
from gmlp_scale.distributed.logs import command, progress_bar
from gmlp_scale.prepare.image_sources import BadImageError, as_jpeg
from gmlp_scale.storage.files import is_local, open_filesystem, read_file, with_retries

_ROWS_AT_A_TIME = 8192


@command
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", metavar="SHARDS_DIR", help="a path or a URL")
    folder = parser.parse_args().shards
    manifest = (ImageManifest if is_of_images(folder) else Manifest).load(folder)
    shards = [*manifest.splits.train, *manifest.splits.heldout]
    problems = check_all_listed(folder, shards)
    if isinstance(manifest, Manifest):
        problems += check_tokenizer(folder, manifest)
    for shard in progress_bar(shards, desc="verifying", unit="shard"):
        with tempfile.TemporaryDirectory() as cache_dir:
            files = ShardFiles(folder, None if is_local(folder) else cache_dir)
            problems += faults_of_shard(files, shard, manifest)
    for problem in problems:
        print(f"BAD {problem}")
    rows = f"{manifest.num_rows('train'):,} train and {manifest.num_rows('heldout'):,} held-out rows"
    kind = f"of {manifest.sequence_length} tokens" if isinstance(manifest, Manifest) else "of images"
    print(f"{len(shards):,} shards, {rows} {kind}: {len(problems)} problems")
    return 1 if problems else 0


def is_of_images(folder: str) -> bool:
    with suppress(FileNotFoundError, NotADirectoryError):
        return b'"jpg and cls"' in read_file(f"{folder.rstrip('/')}/{MANIFEST_NAME}")
    return False


def faults_of_shard(files: ShardFiles, shard: Shard, manifest: Manifest | ImageManifest) -> Iterator[str]:
    try:
        path = files.local_path(shard)
        yield from (_faulty_rows if isinstance(manifest, Manifest) else _faulty_images)(path, shard, manifest)
    except (CorruptShardError, OSError) as error:
        yield f"{shard.name}: {error}"


def _faulty_images(path: Path, shard: Shard, manifest: ImageManifest) -> Iterator[str]:
    images = unpack_images(read_verified(path, shard), shard, len(manifest.classes))
    for number, image in enumerate(images):
        try:
            as_jpeg(image.jpeg)
        except BadImageError as error:
            yield f"{shard.name}: image {number} cannot be decoded ({error})"


def _faulty_rows(path: Path, shard: Shard, manifest: Manifest) -> Iterator[str]:
    rows, cls = ShardRows(path, shard, manifest.sequence_length, manifest.row_dtype), manifest.special.cls
    for start in range(0, shard.rows, _ROWS_AT_A_TIME):
        part = rows.read(np.arange(start, min(start + _ROWS_AT_A_TIME, shard.rows)))
        if part.max() >= manifest.vocab_size:
            row = start + int(part.max(axis=1).argmax())
            yield f"{shard.name}: row {row} has id {part.max()}, the vocabulary has {manifest.vocab_size}"
        if cls is not None and (part[:, 0] != cls).any():
            row = start + int((part[:, 0] != cls).argmax())
            yield f"{shard.name}: row {row} does not begin with <cls>"


def check_all_listed(folder: str, shards: list[Shard]) -> list[str]:
    """Names each shard of the folder that the manifest does not list."""
    filesystem, root = open_filesystem(folder)
    found = with_retries(lambda: filesystem.glob(f"{root}/*/*.tar"), f"listing {folder}")
    names = {"/".join(path.split("/")[-2:]) for path in found} - {shard.name for shard in shards}
    return [f"{name}: is there, but the manifest does not list it" for name in sorted(names)]


def check_tokenizer(folder: str, manifest: Manifest) -> list[str]:
    url = f"{folder.rstrip('/')}/tokenizer/{JSON_NAME if manifest.special_ids else MODEL_NAME}"
    try:
        sha256 = hashlib.sha256(read_file(url)).hexdigest()
    except OSError as error:
        return [f"{url}: {error}"]
    if sha256 == manifest.tokenizer_sha256:
        return []
    return [f"{url}: has sha256 {sha256}, the manifest says {manifest.tokenizer_sha256}"]


if __name__ == "__main__":
    sys.exit(main())
