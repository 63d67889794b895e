"""The list of a folder's shards, with the checksum of each, and the check of a shard's file against it.

The manifests of all kinds of rows are ShardLists: Manifest for tokens (shards.py), ImageManifest for images
(image_shards.py).
"""

import hashlib
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import check_seal, read_file, sealed

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"

Split = Literal["train", "heldout"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardError(InputError):
    """The shards cannot be used as they are; the message says why."""


class CorruptShardError(ShardError):
    """A shard whose bytes are not what its manifest says."""

    def __init__(self, name: str, found: str, otherwise: str = ""):
        super().__init__(f"shard {name} is corrupt: {found}. Write or copy it again{otherwise}")
        self.name = name
        self.found = found
        self._otherwise = otherwise

    def __reduce__(self):  # pickle would call the class with its message alone
        return type(self), (self.name, self.found, self._otherwise)


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
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
            raise ShardError(
                f"{path} is not a valid manifest of shards of {cls.writer} ({problems}). Write the shards again"
            ) from error
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
