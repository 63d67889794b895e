"""From a shard's name to a file on this machine."""

import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from gmlp_scale.data.shards import Shard, ShardError


def is_local(folder: str) -> bool:
    """Whether a folder, a path or a URL that fsspec opens, is on this machine's file system."""
    return isinstance(fsspec.url_to_fs(folder)[0], LocalFileSystem)


class ShardFiles:
    """The shards of a folder as local files; those of a remote folder are copied into `cache_dir` when first wanted.

    folder: a path or a URL that fsspec opens.
    """

    def __init__(self, folder: str, cache_dir: str | None):
        self._filesystem, self._root = fsspec.url_to_fs(folder)
        if not is_local(folder) and cache_dir is None:
            raise ShardError(
                f"data.shards={folder} is not on this machine: set data.cache_dir to a local folder that its shards "
                "may be copied to"
            )
        self._cache_dir = Path(cache_dir) if cache_dir else None

    def local_path(self, shard: Shard) -> Path:
        """Path of the shard's file; its content is not verified yet."""
        if self._cache_dir is None:
            return Path(self._root) / shard.name
        path = self._cache_dir / f"{shard.sha256}.tar"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            self._filesystem.get_file(f"{self._root}/{shard.name}", str(temporary))
            os.replace(temporary, path)
        return path
