import hashlib
import io
import os
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from gmlp_scale.data.manifest import CorruptShardError, Shard
from gmlp_scale.data.shards import ShardRows, ShardWriter, pack_shard
from tests.damage import flipped


@pytest.fixture
def shard(tmp_path):
    """A folder with one shard of 600 rows of 16 tokens."""
    rows = np.random.default_rng(0).integers(0, 60000, (600, 16)).astype("<u2")
    writer = ShardWriter(tmp_path, "train", "train-00000", sequence_length=16, rows_per_shard=600)
    writer.add(rows)
    (shard,) = writer.close()
    return tmp_path / shard.name, shard, rows


def stated(path, rows=1):
    """A manifest entry that vouches for whatever the file holds, as a forger would write it."""
    content = path.read_bytes()
    return Shard(name="train/train-x.tar", rows=rows, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def test_writer_cuts_shards_and_reader_returns_every_row(tmp_path):
    rows = np.random.default_rng(0).integers(0, 60000, (2345, 7)).astype("<u2")
    writer = ShardWriter(tmp_path, "heldout", "heldout-00003", sequence_length=7, rows_per_shard=1000)
    for start in range(0, 2345, 321):
        writer.add(rows[start : start + 321])
    shards = writer.close()
    assert [shard.rows for shard in shards] == [1000, 1000, 345]
    assert [shard.name for shard in shards] == [f"heldout/heldout-00003-{n:06d}.tar" for n in range(3)]
    assert sorted(p.name for p in (tmp_path / "heldout").iterdir()) == [s.name.split("/")[1] for s in shards]
    found = [ShardRows(tmp_path / s.name, s, 7).read(np.arange(s.rows)) for s in shards]
    assert (np.concatenate(found) == rows).all()
    assert (
        ShardRows(tmp_path / shards[1].name, shards[1], 7).read(np.array([999, 0, 999])) == rows[[1999, 1000, 1999]]
    ).all()


def test_plain_webdataset_reads_a_shard(shard):
    import webdataset

    path, _, rows = shard
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"train-00000-000000-{n:05d}" for n in range(3)]
    assert (np.concatenate([sample["npy"] for sample in samples]) == rows).all()


def test_bytes_depend_on_rows_and_name_alone(shard, tmp_path):
    path, entry, rows = shard
    code = (
        "import numpy as np, sys; from gmlp_scale.data.shards import pack_shard;"
        f"rows = np.load({str(tmp_path / 'rows.npy')!r}); sys.stdout.buffer.write(pack_shard(rows, {entry.name!r}))"
    )
    np.save(tmp_path / "rows.npy", rows)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == path.read_bytes()


def test_every_kind_of_damage_is_found(shard, trials):
    path, entry, _ = shard
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    damaged = [b"", whole[:-1], whole[: len(whole) // 2], whole + b"\0"]
    for place in [0, 100, 511, 512, len(whole) - 1, *random.integers(0, len(whole), 60)]:
        damaged.append(flipped(whole, place, int(random.integers(8))))
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CorruptShardError, match=r"train/train-00000-000000\.tar is corrupt"):
            ShardRows(path, entry, 16)
    path.unlink()
    with pytest.raises(CorruptShardError, match="cannot be read"):
        ShardRows(path, entry, 16)
    trials("a shard's bit flipped, byte zeroed, file cut or longer", len(damaged) + 1)


def test_a_shard_that_changes_while_it_is_open_gives_the_rows_that_were_verified(shard):
    path, record, rows = shard
    opened = ShardRows(path, record, rows.shape[1])
    path.write_bytes(bytes(record.bytes))  # in place, as cp or rsync --inplace do
    assert np.array_equal(opened.read(np.arange(len(rows))), rows)
    os.truncate(path, 100)
    assert np.array_equal(opened.read(np.arange(len(rows))), rows)
    with pytest.raises(CorruptShardError, match="has 100 bytes"):
        ShardRows(path, record, rows.shape[1])


def test_wrong_count_and_wrong_shape_are_found(shard, trials):
    path, entry, _ = shard
    with pytest.raises(CorruptShardError, match="holds 600 rows, the manifest says 599"):
        ShardRows(path, entry.model_copy(update={"rows": 599}), 16)
    with pytest.raises(CorruptShardError, match="needed are rows of 8 tokens"):
        ShardRows(path, entry, 8)
    trials("shards missing, empty, of wrong count, listed twice or out of order", 2)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def lying_npy():
    """A header that promises more rows than there are bytes."""
    return npy(np.zeros((4, 16), "<u2")).replace(b"(4, 16)", b"(9, 16)")


def member(name, content=b"", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info, content


GOOD = npy(np.zeros((4, 16), "<u2"))
BLOCK = "train-x-00001.npy"  # the name that the second member must have
MALICIOUS = {
    "other shard": member("train-y-00001.npy", GOOD),
    "first again": member("train-x-00000.npy", GOOD),
    "parent": member(f"../{BLOCK}", GOOD),
    "absolute": member(f"/tmp/{BLOCK}", GOOD),
    "folder": member(f"a/{BLOCK}", GOOD),
    "pickle": member("train-x-00001.pkl", pickle.dumps(Trap())),
    "pickled array": member(BLOCK, npy(np.array([Trap()], object), allow_pickle=True)),
    "python code": member("train-x-00001.py", b"raise SystemExit"),
    "symbolic link": member(BLOCK, kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": member(BLOCK, kind=tarfile.LNKTYPE, link="/etc/passwd"),
    "device": member(BLOCK, kind=tarfile.CHRTYPE),
    "fifo": member(BLOCK, kind=tarfile.FIFOTYPE),
    "directory": member(BLOCK, kind=tarfile.DIRTYPE),
    "not an array": member(BLOCK, b"hello"),
    "empty member": member(BLOCK),
    "other dtype": member(BLOCK, npy(np.zeros((4, 16), "<i4"))),
    "big endian": member(BLOCK, npy(np.zeros((4, 16), ">u2"))),
    "Fortran order": member(BLOCK, npy(np.asfortranarray(np.ones((4, 16), "<u2")))),
    "three axes": member(BLOCK, npy(np.zeros((2, 2, 16), "<u2"))),
    "lying header": member(BLOCK, lying_npy()),
    "huge header": member(BLOCK, b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_malicious_members_are_refused(kind, tmp_path, trials):
    path = tmp_path / "x.tar"
    info, content = MALICIOUS[kind]
    first = tarfile.TarInfo("train-x-00000.npy")
    first.size = len(GOOD)
    with tarfile.open(path, "w") as tar:
        tar.addfile(first, io.BytesIO(GOOD))
        tar.addfile(info, io.BytesIO(content))
    with pytest.raises(CorruptShardError):
        ShardRows(path, stated(path, rows=8), 16)
    trials("tar members with ../, links, devices, pickles; right checksums", 1)


def test_a_lying_tar_size_is_refused(tmp_path, trials):
    """A member that claims to reach past the end of the file."""
    path = tmp_path / "x.tar"
    info = tarfile.TarInfo("train-x-00000.npy")
    info.size = len(GOOD) + 10**6 * 32
    path.write_bytes(info.tobuf() + GOOD.replace(b"(4, 16), }      ", b"(1000004, 16), }"))
    with pytest.raises(CorruptShardError):
        ShardRows(path, stated(path, rows=1000004), 16)
    trials("tar members with ../, links, devices, pickles; right checksums", 1)


def test_rows_must_be_16_bit():
    with pytest.raises(AssertionError):
        pack_shard(np.zeros((2, 4), "<i8"), "train/train-x.tar")
