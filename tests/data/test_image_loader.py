"""The batches of images: the same on any ranks and with any workers, from shards that are verified.

Workers end with the process that started them, however that ends, although they hear no stop signals."""

import errno
import io
import os
import resource
import shutil
import signal
import tarfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch

from gmlp_scale.data import image_shards
from gmlp_scale.data.augmentation import AugmentationConfig
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.image_loader import ImageDataConfig, ImageLoader, made_ahead
from gmlp_scale.data.image_shards import ImageShards, StoredImage, pack_images, unpack_images
from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError
from gmlp_scale.errors import UserError
from tests.damage import flipped
from tests.data.conftest import plan_of
from tests.forked import fork
from tests.gloo_ranks import run_ranks
from tests.written_images import stored_images, write_image_shards

SIZE = 12


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_image_shards(tmp_path_factory.mktemp("images"))


def loader(shards, *, augmentation=None, num_workers=0, cache_dir=None, **changes) -> ImageLoader:
    fields = {"image_size": SIZE, "num_classes": 3, "seed": 1} | changes
    data = ImageDataConfig(shards=str(shards), cache_dir=cache_dir, num_workers=num_workers, shuffle_group_bytes=1)
    policy = AugmentationConfig(policy="none", **(augmentation or {}))
    return ImageLoader(data, policy, plan_of(fields), **fields)


def batches(*loaders: ImageLoader, start: int = 0, stop: int = 5) -> list[ImageBatch]:
    """The steps' global batches, put together from all ranks."""
    steps = zip(*(loader.steps(start, stop) for loader in loaders), strict=True)
    return [_joined([batch for micro_batches in step for batch in micro_batches]) for step in steps]


def _joined(parts: list[ImageBatch]) -> ImageBatch:
    return ImageBatch(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))


def assert_equal(found: list[ImageBatch], expected: list[ImageBatch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(vars(one)[name], vars(other)[name]) for name in vars(one))


def test_a_batch_is_a_function_of_the_step(shards):
    expected = batches(loader(shards))
    assert_equal(batches(loader(shards), start=3), expected[3:])
    two_ranks = [loader(shards, rank=rank, world_size=2, micro_batch_size=4) for rank in range(2)]
    assert_equal(batches(*two_ranks), expected)
    with_workers = loader(shards, num_workers=2)
    assert_equal(batches(with_workers), expected)
    growing = [loader(shards, rank=rank, world_size=2, global_batch_size=[(0, 8), (2, 16)]) for rank in range(2)]
    first, second, third = batches(*growing, stop=3)
    assert_equal([first, second], expected[:2])
    assert_equal([third], [_joined(expected[2:4])])
    assert_equal(batches(*growing, start=2, stop=3), [third])
    assert with_workers.wait_seconds > 0


def test_an_epoch_visits_every_image_once_with_its_label(shards):
    plain = {"crop_scale": (1, 1), "flip": False, "mixup_alpha": 0, "cutmix_alpha": 0}
    order = [batch for batch in batches(loader(shards, augmentation=plain, global_batch_size=2), stop=18)]
    for epoch in (order[:9], order[9:]):
        batch = _joined(epoch)
        assert batch.labels_B.tolist() == batch.images_B3HW.float().mean((2, 3)).argmax(1).tolist()
        assert len({image.numpy().tobytes() for image in batch.images_B3HW}) == 18
    assert order[0].labels_B.tolist() + order[1].labels_B.tolist() != [
        image.label for image in stored_images(shards)["train"][:4]
    ]


def test_every_heldout_image_counts_once_on_any_number_of_ranks(shards):
    expected = [image.label for image in stored_images(shards)["heldout"]]
    for world_size in (1, 2):
        ranks = [
            list(loader(shards, rank=rank, world_size=world_size, micro_batch_size=4).heldout_batches(100))
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in ranks}) == 1
        in_order = [part for step in zip(*ranks, strict=True) for part in step]
        assert torch.cat([batch.labels_B[:counted] for batch, counted in in_order]).tolist() == expected
    assert sum(counted for _, counted in loader(shards).heldout_batches(5)) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_corrupt_shard_stops_the_run_with_its_name(num_workers, shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "shards")
    path = copy / "train/train-000001.tar"
    path.write_bytes(flipped(path.read_bytes(), 700))
    broken, others = loader(copy, num_workers=num_workers), active_children()
    with pytest.raises(CorruptShardError, match=r"train/train-000001.tar is corrupt: .* sha256") as caught:
        batches(broken)
    assert "on_corrupt_shard" not in str(caught.value)
    assert not set(active_children()) - set(others)
    broken.close()


def test_the_workers_of_a_rank_verify_each_shard_once(shards, tmp_path, monkeypatch):
    def noting(path, shard):
        with open(tmp_path / "verified", "a") as file:
            print(shard.name, file=file)
        return read_verified(path, shard)

    read_verified = image_shards.read_verified
    monkeypatch.setattr(image_shards, "read_verified", noting)
    with_workers = loader(shards, num_workers=2)
    assert_equal(batches(with_workers), batches(loader(shards)))
    names = [f"train/train-{number:06d}.tar" for number in range(4)]
    assert sorted((tmp_path / "verified").read_text().split()) == sorted(2 * names)  # of the second loader too
    batches(with_workers)
    assert sum(1 for _ in with_workers.heldout_batches(6)) == sum(1 for _ in with_workers.heldout_batches(6)) == 3
    assert (tmp_path / "verified").read_text().split()[8:] == [f"heldout/heldout-{number:06d}.tar" for number in (0, 1)]


def test_a_shard_that_changes_after_it_was_verified_is_refused_or_copied_again(shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "shards")
    direct, cached = loader(copy), loader(copy, cache_dir=str(tmp_path / "cache"))
    expected = batches(direct)
    assert_equal(batches(cached), expected)
    for file in (tmp_path / "cache").glob("*.tar"):
        file.write_bytes(file.read_bytes()[:2000])
    assert_equal(batches(cached), expected)
    path = copy / "train/train-000002.tar"
    whole = path.read_bytes()
    for changed in (whole[:1600] + bytes([whole[1600] ^ 1]) + whole[1601:], whole[:700]):
        path.write_bytes(changed)
        with pytest.raises(CorruptShardError, match=r"train/train-000002.tar is corrupt"):
            batches(direct)
    path.write_bytes(whole)
    assert_equal(batches(direct), expected)


def test_workers_fetch_shards_from_a_server_and_name_what_it_lacks(shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "shards")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/shards"
    assert_equal(batches(loader(url, num_workers=2, cache_dir=str(tmp_path / "cache"))), batches(loader(shards)))
    shutil.rmtree(copy / "train")
    with pytest.raises(CorruptShardError, match=r"shards/train/train-\d+\.tar does not exist"):
        batches(loader(url, num_workers=1, cache_dir=str(tmp_path / "other")))
    server.shutdown()


def test_an_error_of_the_disk_comes_out_of_a_worker_as_it_is(shards, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "cache/1.tar")

    monkeypatch.setattr(ImageShards, "read", full)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: 'cache/1.tar'$"):
        batches(loader(shards, num_workers=1))


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_killed_worker_is_reported_as_what_it_is(shards, monkeypatch):
    monkeypatch.setattr(ImageShards, "read", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match=r"ended with exit code -9; .* Lower data.num_workers"):
        batches(loader(shards, num_workers=1))


def _read_with_little_shared_memory(shards: Path) -> str:
    """No file may grow beyond 100 bytes, also none of /dev/shm."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(UserError) as error:
        batches(loader(shards, num_workers=1))
    return str(error.value)


def test_a_batch_that_shared_memory_has_no_room_for_ends_the_run(shards):
    (error,) = run_ranks(_read_with_little_shared_memory, 1, shards, timeout_seconds=60)
    assert "ended with exit code 28; " in error and "a full /dev/shm" in error and "--shm-size" in error


def _tar(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (pack_images([StoredImage(b"x", 3)]), "needed: a number below 3"),
        (pack_images([StoredImage(b"x", 1), StoredImage(b"x", 1)]), "holds 2 images, the manifest says 1"),
        (_tar("000000.cls", "000000.pyd"), "has the members cls, pyd; needed: cls, jpg"),
    ],
)
def test_a_shard_must_hold_what_the_manifest_says(content, found):
    shard = Shard(name="train/train-000000.tar", rows=1, bytes=1, sha256="0" * 64)
    with pytest.raises(CorruptShardError, match=found):
        unpack_images(content, shard, num_classes=3)


def test_shards_that_do_not_fit_are_one_clear_error(shards):
    with pytest.raises(ShardError, match=r"model.vocab_size is 4, the shards have 3 classes"):
        loader(shards, num_classes=4)


def test_mixing_needs_no_more_than_the_pair(shards):
    whole = batches(loader(shards, micro_batch_size=8), stop=2)
    assert_equal(batches(loader(shards, micro_batch_size=2), stop=2), whole)
    assert len(np.unique(whole[0].shares_B)) == 4


_kept = []


def _start_and_end(path: Path, how: str) -> None:
    batches = made_ahead(lambda key: os.getpid(), range(100), num_workers=2, prefetch_batches=1)
    pids = [next(batches), next(batches)]
    path.write_text(" ".join(map(str, pids)))
    match how:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "closed":
            batches.close()
            assert not any(is_running(pid) for pid in pids)
        case "left open":
            _kept.append(batches)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(("how", "code"), [("killed", -signal.SIGKILL), ("closed", 0), ("left open", 0)])
def test_workers_end_with_their_parent(how, code, tmp_path):
    process = fork(_start_and_end, tmp_path / "pids", how)
    process.join(60)
    assert process.exitcode == code
    deadline = time.monotonic() + 60
    while any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
