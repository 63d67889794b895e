"""Shards of images: the manifest, the bytes of a shard, and the reader.

    SHARDS_DIR/manifest.json                          the classes' names, and the checksum of every shard
    SHARDS_DIR/train/*.tar  SHARDS_DIR/heldout/*.tar

A shard is what webdataset's users expect: an uncompressed tar with the members 000000.jpg and 000000.cls of each image,
the class as a decimal number. The webdataset package writes it and can read it. Our reader takes the members' places
from the tar's headers. The order and the checksums are ours.
"""

import fcntl
import io
import itertools
import mmap
import os
import tarfile
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import xxhash
from pydantic import Field, model_validator

from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardFiles, ShardList, Split, Splits, read_verified
from gmlp_scale.data.order import first_rows, places_in_shards

_NOTE = np.dtype([("offset", "i8"), ("size", "i8"), ("label", "i8"), ("checksum", "u8")])
"""A _Member's fields, and the image's _checksum."""


class StoredImage(NamedTuple):
    jpeg: bytes
    label: int


class ImageManifest(ShardList, frozen=True, extra="forbid"):
    """The manifest of shards of images."""

    writer: ClassVar[str] = "data_prep/prepare_images.py"

    format_version: Literal[1] = 1
    members: Literal["jpg and cls"] = "jpg and cls"
    classes: tuple[str, ...]
    """The classes' names. An image's label is the place of its class in this list."""
    total_rows: dict[Split, int]
    splits: Splits
    xxh3_128: str | None = Field(default=None, exclude=True)
    """Checksum of the file's text without this field."""

    @model_validator(mode="after")
    def _classes_are_distinct(self):
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("two classes have the same name")
        return self


def pack_images(images: Iterable[StoredImage]) -> bytes:
    """The bytes of a shard; only the images and their order decide them."""
    import webdataset

    buffer = io.BytesIO()
    # Without a fixed time and owner the bytes would differ from run to run.
    with webdataset.TarWriter(buffer, user="", group="", mtime=0, compress=False, encoder=False) as tar:
        for number, image in enumerate(images):
            tar.write({"__key__": f"{number:06d}", "jpg": image.jpeg, "cls": str(image.label).encode()})
    return buffer.getvalue()


class _Member(NamedTuple):
    offset: int
    """Where the JPEG file begins in the shard. [bytes]"""
    size: int
    """The length of the JPEG file. [bytes]"""
    label: int


def unpack_images(content: bytes, shard: Shard, num_classes: int) -> list[StoredImage]:
    """The images of a shard's bytes. CorruptShardError if they are not as `pack_images` writes them."""
    members = _members(content, shard, num_classes)
    return [StoredImage(content[offset : offset + size], label) for offset, size, label in members]


def _members(content: bytes, shard: Shard, num_classes: int) -> list[_Member]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            by_key = itertools.groupby(tar, lambda member: member.name.partition(".")[0])
            members = [_member(key, list(files), content, num_classes) for key, files in by_key]
    except (tarfile.TarError, ValueError) as error:
        raise CorruptShardError(shard.name, f"it is no shard of images ({error})") from error
    if len(members) != shard.rows:
        raise CorruptShardError(shard.name, f"it holds {len(members)} images, the manifest says {shard.rows}")
    return members


def _member(key: str, files: list[tarfile.TarInfo], content: bytes, num_classes: int) -> _Member:
    if (names := sorted(file.name.removeprefix(f"{key}.") for file in files)) != ["cls", "jpg"]:
        raise ValueError(f"{key} has the members {', '.join(names)}; needed: cls, jpg")
    label, jpeg = sorted(files, key=lambda file: file.name)
    digits = content[label.offset_data : label.offset_data + label.size]
    if not digits.isdigit() or not int(digits) < num_classes:
        raise ValueError(f"{key}.cls is {digits[:20]!r}; needed: a number below {num_classes}")
    return _Member(jpeg.offset_data, jpeg.size, int(digits))


class ImageShards:
    """The images of one split, for a process and the processes that it forks afterwards.

    Whichever of them first needs a shard verifies it, and notes in shared memory where each image is and the checksum
    of each. Then all read single images and compare these checksums, so no later change of a file reaches a batch.

    Raises CorruptShardError at the read of an image whose shard is not what the manifest says.
    """

    def __init__(self, files: ShardFiles, shards: Sequence[Shard], num_classes: int, *, num_open: int):
        self._files, self._shards, self._num_classes, self._num_open = files, shards, num_classes, num_open
        self._open: OrderedDict[int, io.FileIO] = OrderedDict()
        self._first_rows = first_rows(shard.rows for shard in shards)
        shared = mmap.mmap(-1, int(self._first_rows[-1]) * _NOTE.itemsize)
        self._notes = np.frombuffer(shared, _NOTE)  # a size of 0 stands for an image that is not noted
        self._locks = tempfile.TemporaryFile()  # noqa: SIM115 - who verifies shard i locks byte i

    def places(self, row_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For images by their numbers in the split: the index of the shard that holds each, and its number there."""
        return places_in_shards(self._first_rows, row_indices)

    def read(self, shards_B: np.ndarray, row_indices_B: np.ndarray) -> list[StoredImage]:
        """The images with these indices within the shards with these indices."""
        return [self._image(*place) for place in zip(shards_B.tolist(), row_indices_B.tolist(), strict=True)]

    def _image(self, shard: int, row_index: int) -> StoredImage:
        if (image := self._noted(shard, row_index)) is None:
            fcntl.lockf(self._locks, fcntl.LOCK_EX, 1, shard)  # the kernel drops it if its holder is killed
            try:
                if (image := self._noted(shard, row_index)) is None:
                    self._verify(shard)
                    image = self._noted(shard, row_index)
            finally:
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, shard)
        if image is None:
            raise CorruptShardError(self._shards[shard].name, "it changes while it is read")
        return image

    def close(self) -> None:
        for file in (self._locks, *self._open.values()):
            file.close()

    def _noted(self, shard: int, row_index: int) -> StoredImage | None:
        """The image, if its shard was verified and it has not changed since."""
        offset, size, label, checksum = self._notes[self._first_rows[shard] + row_index].item()
        if not size:
            return None
        try:
            jpeg = os.pread(self._opened(shard).fileno(), size, offset)
        except (OSError, CorruptShardError):
            return None  # _verify raises what is wrong with the file
        return StoredImage(jpeg, label) if _checksum(jpeg, label) == checksum else None

    def _opened(self, shard: int) -> io.FileIO:
        if shard not in self._open:
            self._open[shard] = self._files.local_path(self._shards[shard]).open("rb", buffering=0)
            if len(self._open) > self._num_open:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(shard)
        return self._open[shard]

    def _verify(self, index: int) -> None:
        """Verifies a shard and notes its images."""
        if index in self._open:
            self._open.pop(index).close()  # the file was replaced, or is about to be
        shard = self._shards[index]
        content = self._files.opened(shard, lambda path: read_verified(path, shard))
        members = _members(content, shard, self._num_classes)
        view = memoryview(content)
        notes = [(*member, _checksum(view[member.offset :][: member.size], member.label)) for member in members]
        self._notes[self._first_rows[index] : self._first_rows[index + 1]] = notes


def _checksum(jpeg: bytes | memoryview, label: int) -> int:
    return xxhash.xxh3_64_intdigest(jpeg, label)  # the label is the seed: it is covered too
