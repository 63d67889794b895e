"""Shards of images: the manifest, the bytes of a shard, and the reader.

    SHARDS_DIR/manifest.json                          the classes' names, and the checksum of every shard
    SHARDS_DIR/train/*.tar  SHARDS_DIR/heldout/*.tar

A shard is what webdataset's users expect: an uncompressed tar with the members 000000.jpg and 000000.cls of each image,
the class as a decimal number. The webdataset package writes and reads it. The order and the checksums are ours.
"""

import io
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from gmlp_scale.data.cache import ShardFiles
from gmlp_scale.data.shards import CorruptShardError, Shard, ShardList, Split, Splits, read_verified

_MEMBERS = {"jpg", "cls"}


class StoredImage(NamedTuple):
    jpeg: bytes
    label: int


class ImageManifest(ShardList, frozen=True, extra="forbid"):
    """Of rows that are images."""

    writer: ClassVar[str] = "data_prep/prepare_images.py"

    format_version: Literal[1] = 1
    members: Literal["jpg and cls"] = "jpg and cls"
    classes: tuple[str, ...]
    """Names; an image's label is the place of its class here."""
    total_rows: dict[Split, int]
    splits: Splits
    xxh3_128: str | None = Field(default=None, exclude=True)
    """Of the file's text without this field."""

    @model_validator(mode="after")
    def _classes_are_distinct(self):
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("two classes have the same name")
        return self


def _webdataset() -> ModuleType:
    """The package, with WDS_SECURE=1: it then neither unpickles nor starts commands."""
    import webdataset
    import webdataset.utils

    webdataset.utils.enforce_security = True
    return webdataset


def pack_images(images: Iterable[StoredImage]) -> bytes:
    """The bytes of a shard; only the images and their order decide them."""
    buffer = io.BytesIO()
    # Without a fixed time and owner the bytes would differ from run to run.
    with _webdataset().TarWriter(buffer, user="", group="", mtime=0, compress=False, encoder=False) as tar:
        for number, image in enumerate(images):
            tar.write({"__key__": f"{number:06d}", "jpg": image.jpeg, "cls": str(image.label).encode()})
    return buffer.getvalue()


def unpack_images(content: bytes, shard: Shard, num_classes: int) -> list[StoredImage]:
    """The images of a shard's bytes. CorruptShardError if they are not as `pack_images` writes them."""
    reading = _webdataset().tariterators
    try:
        members = reading.tar_file_expander([{"url": shard.name, "stream": io.BytesIO(content)}])
        images = [_image(sample, num_classes) for sample in reading.group_by_keys(members)]
    except Exception as error:  # webdataset lets through whatever a broken tar raises
        raise CorruptShardError(shard.name, f"it is no shard of images ({error})", can_be_skipped=False) from error
    if len(images) != shard.rows:
        found = f"it holds {len(images)} images, the manifest says {shard.rows}"
        raise CorruptShardError(shard.name, found, can_be_skipped=False)
    return images


def _image(sample: dict[str, bytes], num_classes: int) -> StoredImage:
    key = sample["__key__"]
    members = {name for name in sample if not name.startswith("__")}
    if members != _MEMBERS:
        raise ValueError(f"{key} has the members {', '.join(sorted(members))}; needed: cls, jpg")
    if not sample["cls"].isdigit() or not int(sample["cls"]) < num_classes:
        raise ValueError(f"{key}.cls is {sample['cls'][:20]!r}; needed: a number below {num_classes}")
    return StoredImage(sample["jpg"], int(sample["cls"]))


class ImageShards:
    """The images of one split. A shard is verified when it is first read; the `num_open` used last stay in memory.

    Raises CorruptShardError at the first read of a shard that is not what the manifest says.
    """

    def __init__(self, files: ShardFiles, shards: Sequence[Shard], num_classes: int, *, num_open: int):
        self._files, self._shards, self._num_classes, self._num_open = files, shards, num_classes, num_open
        self._open: OrderedDict[int, list[StoredImage]] = OrderedDict()

    def read(self, shard: int, row_index: int) -> StoredImage:
        """An image by its place in the shard with this index."""
        if shard not in self._open:
            self._open[shard] = self._verified(self._shards[shard])
            if len(self._open) > self._num_open:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard][row_index]

    def _verified(self, shard: Shard) -> list[StoredImage]:
        try:
            return self._unpacked(shard)
        except CorruptShardError as error:
            if not self._files.discard(shard):
                raise CorruptShardError(shard.name, error.found, can_be_skipped=False) from error
        return self._unpacked(shard)

    def _unpacked(self, shard: Shard) -> list[StoredImage]:
        path: Path = self._files.local_path(shard)
        return unpack_images(read_verified(path, shard), shard, self._num_classes)
