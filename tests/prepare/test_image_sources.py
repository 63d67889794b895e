"""Sources of images that are damaged, or not quite what is expected (tests/data_prep/test_prepare_images.py has whole
ones), and images of other formats as JPEG files."""

import gzip
import io
import shutil
import struct
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from gmlp_scale.data.image_shards import StoredImage, pack_images
from gmlp_scale.errors import InputError
from gmlp_scale.prepare.image_sources import BadImageError, as_jpeg, open_source
from tests.damage import flipped
from tests.written_images import tar_of_folder, tar_of_tars, write_image_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images") / "photos", num_per_class=3)


@pytest.mark.parametrize("pack", [tar_of_folder, tar_of_tars])
def test_a_tar_file_with_one_damaged_header_or_cut_at_one_is_refused(pack, folder, tmp_path):
    """tarfile takes either for the archive's end."""
    whole = pack(folder, tmp_path / "whole.tar").read_bytes()
    assert len(open_source(str(tmp_path / "whole.tar")).images) == 9
    path = tmp_path / "damaged.tar"
    headers = [start for start in range(512, len(whole), 512) if whole[start + 257 : start + 262] == b"ustar"]
    assert len(headers) >= 11
    for header in headers:
        for content in (flipped(whole, header + 100), whole[:header]):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"damaged\.tar is not a whole, uncompressed tar file"):
                open_source(str(path))


def test_a_folder_may_have_a_tar_file_for_each_class(folder, tmp_path):
    """As ImageNet's training images are when their tar file is unpacked."""
    with tarfile.open(tar_of_tars(folder, tmp_path / "whole.tar")) as tar:
        tar.extractall(tmp_path / "classes", filter="data")
    source, expected = open_source(str(tmp_path / "classes")), open_source(str(folder))
    assert source.classes == expected.classes
    assert [(source.read(ref), ref.label) for ref in source.images] == [
        (expected.read(ref), ref.label) for ref in expected.images
    ]


@pytest.mark.parametrize("pack", [lambda source, target: source, tar_of_folder])
def test_hidden_names_are_no_classes_and_no_images(pack, folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "photos")
    shutil.copytree(source / "ant", source / ".ipynb_checkpoints")
    (source / "bee/._0.jpg").write_bytes(b"macOS's note on 0.jpg")
    (source / "._ant.tar").write_bytes(b"macOS's note on ant.tar")
    found = open_source(str(pack(source, tmp_path / "photos.tar")))
    assert found.classes == ("ant", "bee", "cat") and len(found.images) == 9


def test_images_that_lie_deeper_than_their_class_are_counted_in_a_warning(folder, tmp_path, caplog):
    shutil.copytree(folder, tmp_path / "photos/nested")
    with pytest.raises(InputError, match="holds no images; needed: CLASS/NAME"):
        open_source(str(tmp_path / "photos"))
    assert caplog.messages == [f"{tmp_path}/photos: 9 images lie deeper than CLASS/NAME and are left out"]


def test_a_tar_file_of_several_classes_is_not_taken_for_one_class(folder, tmp_path):
    tar_of_folder(folder, tmp_path / "photos.tar")
    with pytest.raises(InputError, match=r"photos\.tar is taken for .*class photos, and has the member photos/bee/0"):
        open_source(str(tmp_path))
    (tmp_path / "photos.tar").write_bytes(pack_images([StoredImage(b"", 0)]))
    with pytest.raises(InputError, match=r"has the member 000000\.cls"):
        open_source(str(tmp_path))


IDX_LABELS = struct.pack(">II", 2049, 3) + bytes([0, 1, 2])
IDX_IMAGES = struct.pack(">IIII", 2051, 3, 2, 2) + bytes(12)


@pytest.mark.parametrize(
    ("images", "labels", "named", "found"),
    [
        (gzip.compress(IDX_IMAGES)[:-4], gzip.compress(IDX_LABELS), "images", "cut short or damaged"),
        (gzip.compress(IDX_IMAGES), gzip.compress(IDX_LABELS)[:20] + bytes(9), "labels", "cut short or damaged"),
        (IDX_IMAGES, gzip.compress(IDX_LABELS), "images", "cut short or damaged"),
        (gzip.compress(IDX_IMAGES), gzip.compress(IDX_LABELS[:7]), "labels", "cut short or damaged"),
        (gzip.compress(IDX_IMAGES[:-1]), gzip.compress(IDX_LABELS), "images", "which its shape"),
        (gzip.compress(IDX_IMAGES), gzip.compress(IDX_IMAGES), "labels", "its first number is 2051; needed: 2049"),
    ],
    ids=["cut", "damaged", "no gzip", "no header", "too short", "another kind"],  # gzip's bytes have the time
)
def test_an_idx_file_that_is_not_whole_is_named(images, labels, named, found, tmp_path):
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(images)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(labels)
    with pytest.raises(InputError, match=rf"t10k-{named}-idx\S* .*{found}"):
        open_source(str(tmp_path / "t10k-images-idx3-ubyte.gz"))


def _parquet(path: Path, **columns) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"image": [b"1", b"2"]}, "has no column label"),
        ({"image": [b"1", b"2"], "label": ["ant", "bee"]}, "column label of string"),
        ({"image": [b"1", b"2"], "label": [0, None]}, "has the label None"),
        ({"image": ["a.jpg", "b.jpg"], "label": [0, 1]}, "column image of string"),
        ({"image": [{"path": "a.jpg"}, {"path": "b.jpg"}], "label": [0, 1]}, "column image of struct<path: string>"),
    ],
)
def test_parquet_with_other_columns_is_refused(columns, found, tmp_path):
    with pytest.raises(InputError, match=rf"a\.parquet .*{found}"):
        open_source(_parquet(tmp_path / "a.parquet", **columns))


def test_parquet_that_is_cut_short_is_named(tmp_path):
    path = Path(_parquet(tmp_path / "a.parquet", image=[b"1"], label=[0]))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"a\.parquet is no whole Parquet file"):
        open_source(str(path))


@pytest.mark.parametrize("of_image", [lambda content: content, lambda content: {"bytes": content, "path": None}])
def test_parquet_of_bytes_is_read_and_a_null_image_is_a_bad_one(of_image, tmp_path):
    images = pa.array([of_image(b"encoded"), None, of_image(None)])
    source = open_source(_parquet(tmp_path / "a.parquet", image=images, label=[0, 1, 0]))
    assert source.read(source.images[0]) == b"encoded"
    for ref in source.images[1:]:
        with pytest.raises(BadImageError, match="has no image"):
            source.read(ref)


GREY, CLEAR = (100, 100, 100), (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("I;16", (8, 8), 100 * 256), 100),
        (Image.new("I;16B", (8, 8), 100 * 256), 100),
        (Image.new("L", (8, 8), 100), 100),
        (Image.new("RGBA", (8, 8), CLEAR), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (*GREY, 255)), GREY),
        (Image.new("LA", (8, 8), (0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), CLEAR).quantize(), (255, 255, 255)),
    ],
    ids=["16 bits", "16 bits, big-endian", "grey", "clear", "opaque", "clear grey", "palette"],
)
def test_an_image_keeps_its_grey_and_what_is_transparent_becomes_white(image, expected):
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode == "I;16B" else "PNG")
    with Image.open(io.BytesIO(as_jpeg(file.getvalue()))) as jpeg:
        assert jpeg.getpixel((3, 3)) == expected


@pytest.mark.parametrize("mode", ["I", "F"])
def test_an_image_whose_white_is_unknown_is_a_bad_one(mode):
    file = io.BytesIO()
    Image.new(mode, (8, 8), 1).save(file, "TIFF")
    with pytest.raises(BadImageError, match=f"mode {mode}"):
        as_jpeg(file.getvalue())
