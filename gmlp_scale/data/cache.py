"""Finds a shard's file on this machine, through a cache that the ranks of a node share."""

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock
from fsspec import AbstractFileSystem

from gmlp_scale.data.manifest import CorruptShardError, Shard, ShardError
from gmlp_scale.storage.files import is_local, open_filesystem, redacted, with_retries

Opened = TypeVar("Opened")

_SHARE_FREED_AT_ONCE = 0.1
"""The share of the limit that is freed at once. A full cache lists its folder only when this much is used up again:
listing 40,000 copies takes 0.5 s."""


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
