"""The list of a folder's shards, with the checksum of each, and where their files are on this machine.

The ranks of a node share a cache of shards. The manifests of all kinds of rows are ShardLists: Manifest for tokens
(shards.py), ImageManifest for images (image_shards.py).
"""

import hashlib
import itertools
import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from filelock import FileLock
from fsspec import AbstractFileSystem
from pydantic import BaseModel, Field, ValidationError, model_validator

from gmlp_scale.errors import InputError, validation_problems
from gmlp_scale.storage.files import check_seal, is_local, open_filesystem, read_file, redacted, sealed, with_retries

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
_SHARE_FREED_AT_ONCE = 0.1
"""The share of the cache's limit that is freed at once. A full cache lists its folder only when this much is used up
again: listing 40,000 copies takes 0.5 s."""

Opened = TypeVar("Opened")
Split = Literal["train", "heldout"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardError(InputError):
    """The shards cannot be used as they are; the message says why."""


class CorruptShardError(ShardError):
    """A shard whose bytes are not what its manifest says."""

    def __init__(self, name: str, found: str, otherwise: str = ""):
        super().__init__(name, found, otherwise)  # all of them, so that the error comes whole from another process
        self.name, self.found = name, found

    def __str__(self) -> str:
        return "shard {} is corrupt: {}. Write or copy it again{}".format(*self.args)


class Shard(BaseModel, frozen=True, extra="forbid"):
    name: str = Field(pattern=r"^(train/train|heldout/heldout)-[A-Za-z0-9_-]+\.tar$")
    """Path relative to the manifest's folder. The shard's members begin with its stem, so a shard holds its split."""
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: Sha256


class Splits(BaseModel, frozen=True, extra="forbid"):
    train: tuple[Shard, ...]
    heldout: tuple[Shard, ...]

    @property
    def total_rows(self) -> dict[Split, int]:
        return {split: sum(shard.rows for shard in shards) for split, shards in self}


class ShardList(BaseModel, frozen=True, extra="forbid"):
    """What the manifests of all kinds of rows share: it names every shard, and has a checksum of its own."""

    writer: ClassVar[str]
    """The script that writes it."""
    if TYPE_CHECKING:  # each kind declares these as its last fields, in the order of its file
        total_rows: dict[Split, int]
        splits: Splits
        xxh3_128: str | None

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read SHARDS_DIR/manifest.json; `folder` is a path or a URL that fsspec opens.

        FileNotFoundError if there is none, ShardError if `folder` is a file, or if the manifest is not valid or its own
        checksum does not hold.
        """
        path = f"{str(folder).rstrip('/')}/{MANIFEST_NAME}"
        try:
            content = read_file(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"no shards at {folder}: {path} does not exist. It is written last by {cls.writer}; "
                "run that to its end, or change data.shards"
            ) from error
        except NotADirectoryError as error:
            raise ShardError(
                f"{folder} is a file: give the folder of the shards, which holds {MANIFEST_NAME}"
            ) from error
        try:
            manifest = cls.model_validate_json(content)
            if manifest.xxh3_128 is not None:
                check_seal(content.decode().rstrip("\n"))
        except ValidationError as error:
            found = f"is not a valid manifest of shards of {cls.writer} ({validation_problems(error)})"
            raise ShardError(f"{path} {found}. Write the shards again") from error
        except ValueError as error:
            raise ShardError(
                f"{path} was damaged or changed after it was written: {error}. Copy it again, or run the same "
                f"{cls.writer} again, which writes it anew"
            ) from error
        if manifest.xxh3_128 is None:
            log.warning(
                "%s is of an older version and has no checksum of its own, so changes to it go unnoticed: the same "
                "%s, run again, writes one",
                path,
                cls.writer,
            )
        return manifest

    @model_validator(mode="after")
    def _totals_are_sums(self):
        if self.total_rows != (sums := self.splits.total_rows):
            raise ValueError(f"total_rows are {self.total_rows} but the shards sum to {sums}")
        return self

    @model_validator(mode="after")
    def _shards_are_listed_once_and_in_order(self):
        for split, shards in self.splits:
            names = [shard.name for shard in shards]
            if strangers := [name for name in names if not name.startswith(f"{split}/")]:
                raise ValueError(f"splits.{split} lists {strangers[0]}, a shard of another split")
            for name, following in itertools.pairwise(names):
                if name >= following:
                    raise ValueError(f"splits.{split} lists {following} twice or out of the names' order")
        listed = (*self.splits.train, *self.splits.heldout)
        checksums = {shard.sha256: shard.name for shard in listed}
        for shard in listed:
            if checksums[shard.sha256] != shard.name:
                raise ValueError(f"{shard.name} and {checksums[shard.sha256]} have the same checksum")
        return self

    def num_rows(self, split: Split) -> int:
        return self.total_rows[split]

    def to_json(self) -> str:
        """The text of the file, with its checksum."""
        return sealed(self.model_dump_json(indent=1)) + "\n"

    @property
    def sha256(self) -> str:
        """Checksum of the manifest, which holds the checksum of every shard."""
        return hashlib.sha256(f"{self.model_dump_json(indent=1)}\n".encode()).hexdigest()


def read_verified(path: Path, shard: Shard) -> bytes:
    """The bytes of a shard's file. CorruptShardError unless it is there with the manifest's size and checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptShardError(shard.name, f"{path} cannot be read ({error.strerror})") from error
    if len(content) != shard.bytes:
        raise CorruptShardError(shard.name, f"{path} has {len(content)} bytes, the manifest says {shard.bytes}")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != shard.sha256:
        raise CorruptShardError(shard.name, f"{path} has sha256 {sha256}, the manifest says {shard.sha256}")
    return content


class ShardFiles:
    """The shards of a folder as local files; with a `cache_dir` each is copied there when it is first needed.

    All processes of the machine share the copies. A shard is fetched once, verified, and appears under its name only
    when whole, so what a killed process leaves is never read. Beyond `max_bytes` the copies that were used longest ago
    are removed, a tenth of the limit at once; a process that has one open keeps it.

    folder: a path or a URL that fsspec opens.
    """

    def __init__(self, folder: str, cache_dir: str | None, *, max_bytes: float = math.inf):
        self._folder = folder  # each process opens it: one that uses a network must not be used after a fork
        _, self._root = open_filesystem(folder)
        if not is_local(folder) and cache_dir is None:
            raise ShardError(
                f"data.shards={folder} is not on this machine: set data.cache_dir to a local folder that its shards "
                "may be copied to"
            )
        self._cache_dir = Path(cache_dir) if cache_dir else None
        self._max_bytes = max_bytes

    def local_path(self, shard: Shard) -> Path:
        """Path of the shard's file. CorruptShardError if the file to copy is missing or differs from the manifest."""
        if self._cache_dir is None:
            return Path(self._root) / shard.name
        path = self._cached_path(shard)
        with self._lock(shard.sha256):
            if not path.exists():
                self._copy(shard, path)
        with suppress(FileNotFoundError):
            os.utime(path)
        return path

    def opened(self, shard: Shard, open_path: Callable[[Path], Opened]) -> Opened:
        """open_path(the shard's local path). A cached copy that went bad is fetched again, once."""
        try:
            return open_path(self.local_path(shard))
        except CorruptShardError:
            if self._cache_dir is None:
                raise
        self._cached_path(shard).unlink(missing_ok=True)
        return open_path(self.local_path(shard))

    def _cached_path(self, shard: Shard) -> Path:
        return self._cache_dir / f"{shard.sha256}.tar"

    def _copy(self, shard: Shard, path: Path) -> None:
        filesystem, _ = open_filesystem(self._folder)
        url = redacted(filesystem.unstrip_protocol(f"{self._root}/{shard.name}"))
        try:
            content = with_retries(lambda: self._read_verified(filesystem, shard), f"reading {url}")
        except FileNotFoundError as error:
            raise CorruptShardError(shard.name, f"{url} does not exist") from error
        with self._lock("eviction"):
            self._make_room(shard.bytes)
            temporary = self._cache_dir / f".{shard.sha256}.tmp"  # written by us alone: we hold the shard's lock
            temporary.write_bytes(content)
            os.replace(temporary, path)

    def _read_verified(self, filesystem: AbstractFileSystem, shard: Shard) -> bytes:
        """The shard's bytes. CorruptShardError, which is final, if they are wrong; OSError if some are missing."""
        content = filesystem.cat_file(f"{self._root}/{shard.name}")
        if len(content) < shard.bytes and len(content) < filesystem.size(f"{self._root}/{shard.name}"):
            raise OSError(f"{len(content)} of {shard.bytes} bytes arrived")
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != shard.sha256:
            raise CorruptShardError(shard.name, f"it has {len(content)} bytes and sha256 {sha256}")
        return content

    def _make_room(self, num_bytes: int) -> None:
        """Adds a copy's bytes to the total, and removes other copies if the total is above the limit.

        The total stands in a file. It is written before the copy appears, so a killed process, a discarded copy or one
        that was removed by hand can only leave it too high. Then the folder is listed too early, which corrects it.
        """
        total_path = self._cache_dir / "total_bytes"
        try:
            total = int(total_path.read_text())
        except (FileNotFoundError, ValueError):  # a new folder, or a process was killed as it wrote
            total = math.inf
        if total + num_bytes > self._max_bytes or total == math.inf:
            total = self._list_and_evict(num_bytes)
        total_path.write_text(str(total + num_bytes))

    def _list_and_evict(self, num_bytes: int) -> int:
        """Makes room for `num_bytes` and returns the bytes of the copies that stay."""
        cached = []
        for entry in os.scandir(self._cache_dir):
            if entry.name.endswith(".tar"):
                with suppress(FileNotFoundError):
                    cached.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        total = sum(size for _, size, _ in cached)
        if total + num_bytes > self._max_bytes:
            wanted = (1 - _SHARE_FREED_AT_ONCE) * self._max_bytes - num_bytes
            for _, size, path in sorted(cached):
                if total <= wanted:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size
        return total

    def _lock(self, name: str) -> FileLock:
        """A lock that holds for all processes of the machine. The kernel drops it when its holder ends."""
        locks = self._cache_dir / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / name)
