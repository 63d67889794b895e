"""Images from every kind of source to shards: their members, a job that goes on, and what is refused."""

import gzip
import io
import json
import os
import shutil
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from data_prep import prepare_images, verify_shards
from gmlp_scale.data.image_shards import ImageManifest
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.prepare.job import JobFolder
from tests.forked import fork
from tests.written_images import CLASSES, prepare, stored_images, tar_of_folder, tar_of_tars, write_image_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images") / "photos")


@pytest.fixture(scope="module")
def whole_shards(folder, tmp_path_factory) -> Path:
    """Six shards of the folder's images, not to be changed."""
    shards = tmp_path_factory.mktemp("shards") / "whole"
    assert prepare(*in_shards_of_5(folder), shards, "--workers", 2) == 0
    return shards


@pytest.fixture
def shards(whole_shards, tmp_path) -> Path:
    """A copy to damage; the same command goes on with it."""
    return shutil.copytree(whole_shards, tmp_path / "shards")


def in_shards_of_5(source: Path) -> list:
    return ["--input", source, "--heldout-fraction", 0.25, "--images-per-shard", 5, "--output"]


def _parquet(source: Path, target: Path) -> Path:
    """As the Hugging Face hub has image data sets."""
    paths = sorted(source.glob("*/*.jpg"))
    images = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    labels = [CLASSES.index(path.parent.name) for path in paths]
    features = {"label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    table = pa.table({"image": images, "label": labels})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    target.mkdir()
    pq.write_table(table, target / "train-00000.parquet", row_group_size=5)
    return target


SOURCES = {"folder": lambda source, target: source, "tar": tar_of_folder, "tars.tar": tar_of_tars, "parquet": _parquet}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_images(kind, folder, tmp_path):
    source = SOURCES[kind](folder, tmp_path / f"source.{kind}")
    shards = tmp_path / "shards"
    assert prepare(*in_shards_of_5(source), shards) == 0
    stored = stored_images(shards)
    assert [len(stored["train"]), len(stored["heldout"])] == [18, 6]
    expected = {(path.read_bytes(), CLASSES.index(path.parent.name)) for path in folder.glob("*/*.jpg")}
    assert set(stored["train"] + stored["heldout"]) == expected and len(expected) == 24
    assert ImageManifest.load(shards).classes == CLASSES


def test_parquet_sorted_by_class_holds_out_images_of_several_classes(folder, tmp_path):
    shards = tmp_path / "shards"
    prepare("--input", _parquet(folder, tmp_path / "source"), "--heldout-fraction", 0.25, "--output", shards)
    labels = {split: [image.label for image in images] for split, images in stored_images(shards).items()}
    assert set(labels["train"]) == {0, 1, 2} and len(set(labels["heldout"])) > 1
    assert labels == {split: sorted(of_split) for split, of_split in labels.items()}  # a row group is read once


def test_idx_files_become_grey_jpegs(tmp_path):
    pixels = np.zeros((10, 28, 28), np.uint8)
    pixels[np.arange(10), :, :] = 20 * np.arange(10)[:, None, None]
    images = struct.pack(">IIII", 2051, *pixels.shape) + pixels.tobytes()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    labels = np.arange(10, dtype=np.uint8)
    packed_labels = gzip.compress(struct.pack(">II", 2049, 10) + labels.tobytes())
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(packed_labels)
    command = ["--input", tmp_path / "train-images-idx3-ubyte.gz", "--heldout-fraction", 0.2, "--output"]
    assert prepare(*command, tmp_path / "shards") == 0
    stored = stored_images(tmp_path / "shards")
    assert sorted(image.label for image in stored["train"] + stored["heldout"]) == list(range(10))
    for jpeg, label in stored["train"]:
        image = np.array(Image.open(io.BytesIO(jpeg)))
        assert image.shape == (28, 28) and np.abs(image.astype(int) - 20 * label).max() <= 2


def test_plain_webdataset_reads_a_shard(whole_shards):
    dataset = webdataset.WebDataset(str(whole_shards / "train/train-000000.tar"), shardshuffle=False)
    read = [(sample["jpg"], int(sample["cls"])) for sample in dataset]
    assert read == [tuple(image) for image in stored_images(whole_shards)["train"]][:5]


def test_shards_of_images_are_verified_and_a_changed_manifest_is_refused(shards, monkeypatch, capsys):
    def verify() -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["verify_shards.py", str(shards)])
        capsys.readouterr()
        return verify_shards.main(), capsys.readouterr().out.splitlines()

    assert verify() == (0, ["6 shards, 18 train and 6 held-out rows of images: 0 problems"])
    path = shards / "heldout/heldout-000001.tar"
    path.write_bytes(path.read_bytes()[:-1])
    (shards / "train/train-9.tar").write_bytes(b"")
    code, lines = verify()
    assert code == 1 and len(lines) == 3
    assert "train/train-9.tar: is there, but the manifest does not list it" in lines[0]
    assert "heldout/heldout-000001.tar is corrupt" in lines[1] and "on_corrupt_shard" not in lines[1]
    (shards / "manifest.json").write_text((shards / "manifest.json").read_text().replace('"ant"', '"elk"'))
    with pytest.raises(ShardError, match="damaged or changed"):
        ImageManifest.load(shards)


def _prepare_and_die(arguments: list, num_receipts: int) -> None:
    """Is killed when it has so many receipts and would write the next."""
    write = JobFolder.write

    def dying_write(job: JobFolder, name: str, content: object) -> None:
        if name.startswith("receipts/") and len(job.read_all("receipts")) == num_receipts:
            os.kill(os.getpid(), signal.SIGKILL)
        write(job, name, content)

    JobFolder.write = dying_write
    prepare(*arguments)


def test_a_killed_job_goes_on_and_writes_the_same_bytes(folder, whole_shards, tmp_path, capsys):
    command = [*in_shards_of_5(folder), disturbed := tmp_path / "disturbed"]
    for num_receipts in (1, 4):
        job = fork(_prepare_and_die, command, num_receipts)
        job.join()
        assert job.exitcode == -signal.SIGKILL
        assert not (disturbed / "manifest.json").exists()
        assert len(list((disturbed / "job/receipts").iterdir())) == num_receipts
    written = {path: path.stat().st_mtime_ns for path in (disturbed / "train").glob("*.tar")}
    assert prepare(*command) == 0
    assert sum(path.stat().st_mtime_ns == time for path, time in written.items()) >= 3  # those with a receipt
    names = ["manifest.json", *(f"{path.parent.name}/{path.name}" for path in whole_shards.glob("*/*.tar"))]
    assert len(names) == 7
    assert all((whole_shards / name).read_bytes() == (disturbed / name).read_bytes() for name in names)
    assert prepare(*command, "--images-per-shard", 6) == 2
    assert "images_per_shard was 5, is 6" in capsys.readouterr().err


def _die(_content: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_same_command_goes_on_after_a_killed_worker(folder, tmp_path, capsys, monkeypatch):
    command = ["--input", folder, "--heldout-fraction", 0.25, "--output", tmp_path / "shards"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare_images, "pack_images", _die)
        assert prepare(*command, "--workers", 2) == 1
    assert "a worker was killed" in capsys.readouterr().err
    assert prepare(*command) == 0


def test_the_same_command_writes_lost_and_damaged_shards_again(folder, shards):
    paths = sorted(shards.glob("*/*.tar"))
    whole = [path.read_bytes() for path in paths]
    paths[0].unlink()
    paths[1].write_bytes(whole[1][:-1])
    paths[2].write_bytes(whole[2].replace(b"000001.cls", b"000002.cls"))
    untouched = [path.stat().st_mtime_ns for path in paths[3:]]
    assert prepare(*in_shards_of_5(folder), shards) == 0
    assert [path.read_bytes() for path in paths] == whole
    assert [path.stat().st_mtime_ns for path in paths[3:]] == untouched


def test_a_bad_image_is_named_and_may_be_left_out(tmp_path, capsys):
    source = write_image_folder(tmp_path / "photos", num_per_class=4)
    path = source / "bee/2.jpg"
    path.write_bytes(path.read_bytes()[:300])
    command = ["--input", source, "--heldout-fraction", 0.25, "--output", tmp_path / "shards"]
    assert prepare(*command) == 2
    assert f"1 images cannot be decoded:\n  {path} at 0: " in capsys.readouterr().err
    assert not (tmp_path / "shards/manifest.json").exists()
    assert prepare(*command, "--max-bad-images", 1) == 0
    assert sum(map(len, stored_images(tmp_path / "shards").values())) == 11


def test_mistakes_are_one_clear_message(folder, tmp_path, capsys):
    def message(*arguments) -> str:
        assert prepare(*arguments, "--output", tmp_path / "shards") == 2
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.tar").write_bytes(b"no tar")
    other = write_image_folder(tmp_path / "other", num_per_class=1)
    (other / "ant").rename(other / "dog")
    assert "no images at" in message("--input", tmp_path / "nowhere", "--heldout-fraction", 0.1)
    assert "holds no images" in message("--input", tmp_path / "empty", "--heldout-fraction", 0.1)
    assert "not a whole, uncompressed tar" in message("--input", tmp_path / "torn.tar", "--heldout-fraction", 0.1)
    assert "have the class 'dog'" in message("--input", folder, "--heldout", other)
    assert "--heldout is --input" in message("--input", folder, "--heldout", folder)
    assert "--heldout is --input" in message("--input", folder, "--heldout", f"{folder}/../photos/")
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert "have the same checksum. Give held-out images other" in message("--input", folder, "--heldout", copy)
    shutil.rmtree(tmp_path / "shards")
    assert "leaves 24 of 24" in message("--input", folder, "--heldout-fraction", 0.01)
    with pytest.raises(SystemExit):
        prepare(*in_shards_of_5(folder), tmp_path / "shards", "--max-bad-images", -1)
    assert "--max-bad-images: found -1" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="prepare_images"):
        ImageManifest.load(tmp_path / "shards")
