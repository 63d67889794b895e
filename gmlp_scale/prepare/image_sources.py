"""Finds the images of a folder, of tar files, of Parquet files or of an IDX file, and reads them one by one. Turns an
image of any format that Pillow opens into a JPEG file, as the shards of images hold them."""

import gzip
import io
import json
import logging
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from gmlp_scale.errors import InputError
from gmlp_scale.prepare.input_files import StrictTarInfo
from gmlp_scale.storage.damage import damage_as

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_JPEG_QUALITY = 95
_IDX_IMAGES, _IDX_LABELS = 2051, 2049  # the magic numbers of images and labels


class BadImageError(InputError):
    """An image that cannot be decoded."""


class ImageRef(NamedTuple):
    """Where one image lies."""

    path: str
    place: int
    """The image's first byte in the file. In a Parquet file the row group, in an IDX file the image's number."""
    size: int
    """The image's bytes. In a Parquet file the row within the group."""
    label: int


@dataclass(frozen=True)
class ImageSource:
    classes: tuple[str, ...]
    """Names; an image's label is the place of its class here."""
    images: list[ImageRef]
    read: Callable[[ImageRef], bytes]
    """Returns the bytes of an image file that Pillow opens. Raises BadImageError if there is no image."""
    keeps_order: bool = False
    """Whether the images must be read in their order, since reading them in another one would be slow."""

    def chosen(self, numbers: np.ndarray) -> "ImageSource":
        """The images with these numbers, in this order if that is fast to read, else in the source's own."""
        numbers = np.sort(numbers) if self.keeps_order else numbers
        return replace(self, images=[self.images[number] for number in numbers])

    def with_classes(self, classes: tuple[str, ...]) -> "ImageSource":
        """The same images with the labels of another source's classes. InputError if it lacks one of these."""
        if unknown := [name for name in self.classes if name not in classes]:
            raise InputError(f"the held-out images have the class {unknown[0]!r}, which the training images lack")
        labels = [classes.index(name) for name in self.classes]
        return replace(self, classes=classes, images=[ref._replace(label=labels[ref.label]) for ref in self.images])


def open_source(path: str) -> ImageSource:
    """The images at a path, which may be

    - a folder or a tar file of class folders or, as ImageNet has, of a tar file for each class; names that begin with a
      dot, such as .ipynb_checkpoints, are left out;
    - a Parquet file or a folder of them;
    - an IDX file of images beside its file of labels.

    Raises:
        InputError, OSError: the path is none of these, or holds no image.
    """
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(f"no images at {path}: give a folder, a .tar, a .parquet or an IDX file of images")
    parquet = sorted(place.glob("*.parquet")) if place.is_dir() else [place] * (place.suffix == ".parquet")
    if parquet:
        source = _parquet(parquet)
    elif place.is_dir():
        source = _by_class(_folder_files(place))
    elif place.suffix == ".tar":
        source = _by_class(_tar_members(path))
    elif "images-idx3" in place.name:
        source = _idx(path)
    else:
        raise InputError(f"{path} is no folder, .tar, .parquet or IDX file of images (its name has images-idx3)")
    if not source.images:
        raise InputError(f"{path} holds no images; needed: CLASS/NAME.jpg, or a tar file CLASS.tar for each class")
    return source


def _by_class(found: Iterator[tuple[str, str, int, int]]) -> ImageSource:
    """found: (class, path, first byte, bytes) of each image. The classes are in the order of their names, as
    torchvision has them."""
    found = list(found)
    classes = tuple(sorted({name for name, *_ in found}))
    labels = {name: label for label, name in enumerate(classes)}
    return ImageSource(classes, [ImageRef(*where, labels[name]) for name, *where in found], _read_bytes)


def _read_bytes(ref: ImageRef) -> bytes:
    with open(ref.path, "rb") as file:
        file.seek(ref.place)
        return file.read(ref.size)


def _is_image(path: Path) -> bool:
    """By the path's ending. Hidden files, and those in a hidden folder, are none of the user's images."""
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and not path.parent.name.startswith(".")


def _folder_files(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    num_deeper = 0
    for path in sorted(folder.glob("[!.]*/*")):
        if _is_image(path):
            yield path.parent.name, str(path), 0, path.stat().st_size
        elif path.is_dir():
            num_deeper += sum(map(_is_image, path.rglob("*")))
    if num_deeper:
        log.warning("%s: %d images lie deeper than CLASS/NAME and are left out", folder, num_deeper)
    for path in sorted(folder.glob("[!.]*.tar")):
        with open(path, "rb") as content:
            yield from _images_of_class(content, path.stem, str(path), 0)


def _tar_members(path: str) -> Iterator[tuple[str, str, int, int]]:
    with _opened_tar(path) as tar:
        for member in tar:
            name = Path(member.name)
            if member.isreg() and name.suffix == ".tar" and not name.name.startswith("."):
                yield from _images_of_class(tar.extractfile(member), name.stem, path, member.offset_data)
            elif member.isreg() and _is_image(name) and name.parent.name:
                yield name.parent.name, path, member.offset_data, member.size


def _images_of_class(content: BinaryIO, class_name: str, path: str, first: int) -> Iterator[tuple[str, str, int, int]]:
    """The images in CLASS.tar, which begins at the byte `first` of `path`. InputError if it has several classes."""
    folders = set()
    with _opened_tar(path, content) as tar:
        for member in tar:
            name = Path(member.name)
            is_image = member.isreg() and _is_image(name)
            folders.update([name.parent] * is_image)
            if name.suffix == ".cls" or len(folders) > 1:
                raise InputError(
                    f"{path} is taken for images of the class {class_name}, and has the member {name}: give a tar file "
                    "of class folders as --input itself; shards with .cls members cannot be read"
                )
            if is_image:
                yield class_name, path, first + member.offset_data, member.size


@contextmanager
def _opened_tar(path: str, content: BinaryIO | None = None) -> Iterator[tarfile.TarFile]:
    """The tar file in `content`, or at `path`. InputError in the body where it is damaged."""
    try:
        with tarfile.open(path, "r:", content, tarinfo=StrictTarInfo) as tar:
            yield tar
    except tarfile.TarError as error:
        raise InputError(f"{path} is not a whole, uncompressed tar file ({error})") from error


def _idx(path: str) -> ImageSource:
    labels_path = str(Path(path).with_name(Path(path).name.replace("images-idx3", "labels-idx1")))
    labels, num_images = _idx_values(labels_path, _IDX_LABELS), len(_idx_values(path, _IDX_IMAGES))
    if len(labels) != num_images:
        raise InputError(f"{path} has {num_images} images, {labels_path} has {len(labels)} labels")
    images = [ImageRef(path, number, 1, label) for number, label in enumerate(labels.tolist())]
    return ImageSource(tuple(map(str, range(int(labels.max(initial=0)) + 1))), images, _read_idx)


@lru_cache(maxsize=2)
def _idx_values(path: str, magic: int) -> np.ndarray:
    """uint8: labels [number of images], or images [number, height, width]. InputError if the file is not whole."""
    try:
        content = Path(path).read_bytes()
        content = gzip.decompress(content) if path.endswith(".gz") else content
        found, *shape = struct.unpack_from(">II" if magic == _IDX_LABELS else ">IIII", content)
    except (EOFError, zlib.error, gzip.BadGzipFile, struct.error) as error:
        raise InputError(f"{path} is cut short or damaged ({error}): fetch it again") from error
    num_header_bytes = 4 + 4 * len(shape)
    if found != magic:
        raise InputError(f"{path} is another kind of file: its first number is {found}; needed: {magic}")
    if len(content) != num_header_bytes + math.prod(shape):
        raise InputError(f"{path} has {len(content)} bytes, which its shape {shape} does not fill: fetch it again")
    return np.frombuffer(content, np.uint8, offset=num_header_bytes).reshape(shape)


def _read_idx(ref: ImageRef) -> bytes:
    file = io.BytesIO()
    Image.fromarray(_idx_values(ref.path, _IDX_IMAGES)[ref.place]).save(file, "BMP")
    return file.getvalue()


def _parquet(paths: list[Path]) -> ImageSource:
    """The images of Parquet files such as the Hugging Face hub has: a column `image` of {bytes, path} or of bytes, and
    a column `label` of numbers."""
    import pyarrow.parquet as pq

    images, names = [], ()
    for path in paths:
        with _no_parquet(path):
            file = pq.ParquetFile(path, page_checksum_verification=True)
            _check_columns(path, file.schema_arrow)
            metadata = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            names = names or metadata.get("info", {}).get("features", {}).get("label", {}).get("names") or ()
            for group in range(file.num_row_groups):
                labels = file.read_row_group(group, columns=["label"])["label"].to_pylist()
                images += [ImageRef(str(path), group, row, label) for row, label in enumerate(labels)]
    names = tuple(names or map(str, range(max((ref.label or 0 for ref in images), default=-1) + 1)))
    if wrong := [ref for ref in images if ref.label not in range(len(names))]:
        raise InputError(f"{wrong[0].path} has the label {wrong[0].label}; needed: one of {len(names)} classes")
    return ImageSource(names, images, _read_parquet, keeps_order=True)


def _no_parquet(path: str | Path) -> AbstractContextManager:
    return damage_as(lambda found: InputError(f"{path} is no whole Parquet file ({found}): fetch it again"))


def _check_columns(path: Path, schema: "pyarrow.Schema") -> None:
    from pyarrow import types

    for name in ("image", "label"):
        if name not in schema.names:
            raise InputError(f"{path} has no column {name}; needed: image and label")
    image, label = schema.field("image").type, schema.field("label").type
    if types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (types.is_binary(image) or types.is_large_binary(image)):
        raise InputError(f"{path} has a column image of {image}; needed: encoded images as bytes or {{bytes, path}}")
    if not types.is_integer(label):
        raise InputError(f"{path} has a column label of {label}; needed: whole numbers, the first class being 0")


@lru_cache(maxsize=1)
def _row_group(path: str, group: int) -> list[bytes | None]:
    import pyarrow.parquet as pq

    with _no_parquet(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        columns = file.read_row_group(group, columns=["image"]).flatten()
        return columns["image.bytes" if "image.bytes" in columns.column_names else "image"].to_pylist()


def _read_parquet(ref: ImageRef) -> bytes:
    content = _row_group(ref.path, ref.place)[ref.size]
    if content is None:
        raise BadImageError(f"row {ref.size} of its row group has no image")
    return content


def as_jpeg(content: bytes) -> bytes:
    """A JPEG file as it is; an image of another format as a JPEG file.

    Transparent parts become white, and 16 bits of grey become 8. Raises BadImageError if the image cannot be decoded,
    or if nothing in its pixels says which number is white.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if image.format == "JPEG":
                return content
            file = io.BytesIO()
            _grey_or_rgb(image).save(file, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadImageError(str(error)) from error
    return file.getvalue()


def _grey_or_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise BadImageError(f"its pixels are numbers of 32 bits (mode {image.mode}); needed: 8 or 16 bits")
    if image.mode.startswith("I;16"):  # convert would make all above 255 white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:  # convert would show the colours below it, which are often black
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "L" else image.convert("RGB")
