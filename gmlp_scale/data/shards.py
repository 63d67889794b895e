"""Shards of rows of tokens: their manifest, the writer and the reader.

    SHARDS_DIR/manifest.json                          the rows' form, and the checksum of every shard
    SHARDS_DIR/train/*.tar  SHARDS_DIR/heldout/*.tar
    SHARDS_DIR/tokenizer/                             a copy of the tokenizer's folder

A shard is an uncompressed tar, which plain `webdataset` reads too. Its members are blocks of rows as .npy files. The
reader verifies the checksum of the whole file in memory, takes the rows' offsets from the tar's headers, and copies
rows from there.
"""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS, OUR_SPECIAL_IDS, SpecialIds
from gmlp_scale.data.manifest import CorruptShardError, Sha256, Shard, ShardList, Split, Splits, read_verified
from gmlp_scale.storage.files import write_file

ROW_DTYPE = np.dtype("<u2")
_LONG_ROW_DTYPE = np.dtype("<u4")
ROWS_PER_BLOCK = 256


def row_dtype(vocab_size: int) -> np.dtype:
    """That of the rows of a vocabulary: uint16, or uint32 where uint16 cannot hold all ids."""
    return ROW_DTYPE if vocab_size <= 1 << 16 else _LONG_ROW_DTYPE


class Manifest(ShardList, frozen=True, extra="forbid"):
    """The manifest of shards of rows of tokens."""

    writer: ClassVar[str] = "data_prep/tokenize_corpus.py"

    format_version: Literal[1] = 1
    sequence_length: int = Field(ge=2)
    """Tokens in every row."""
    vocab_size: int = Field(gt=NUM_SPECIAL_TOKENS, le=1 << 31)
    """Every id is below this."""
    dtype: Literal["uint16 little endian", "uint32 little endian"] = "uint16 little endian"
    """uint32 if uint16 cannot hold all ids."""
    packing: Literal["packed", "document"]
    """packed: rows are cut from one stream of documents. document: a row is a document or part of one, padded."""
    tokenizer_sha256: Sha256
    special_ids: SpecialIds | None = Field(default=None, exclude_if=lambda ids: ids is None)
    """Of a tokenizer.json. None: those of a tokenizer that data_prep/train_tokenizer.py wrote."""
    total_rows: dict[Split, int]
    splits: Splits
    xxh3_128: str | None = Field(default=None, exclude=True)
    """Checksum of the file's text without this field. Older manifests have none."""

    @property
    def special(self) -> SpecialIds:
        """The special tokens of its rows."""
        return self.special_ids or OUR_SPECIAL_IDS

    @property
    def row_dtype(self) -> np.dtype:
        return row_dtype(self.vocab_size)

    @model_validator(mode="after")
    def _ids_fit(self) -> Self:
        if self.dtype != (needed := f"{self.row_dtype.name} little endian"):
            raise ValueError(f"dtype is {self.dtype}; a vocabulary of {self.vocab_size} needs {needed}")
        special = self.special
        roles = [id for id in (special.end, special.cls, special.pad, special.mask) if id is not None]
        for first, stop in (*special.ranges, *((id, id + 1) for id in roles)):
            if not 0 <= first < stop <= self.vocab_size:
                raise ValueError(f"special_ids has ids {first} to {stop - 1}, the vocabulary has {self.vocab_size}")
        if self.packing == "document" and special.pad is None:
            raise ValueError("packing is document, and special_ids has no pad")
        return self


def pack_shard(rows_RN: np.ndarray, name: str) -> bytes:
    """The bytes of a shard that holds `rows_RN` (uint16 or uint32 [R, N]); only the rows and the name decide them."""
    assert rows_RN.dtype in (ROW_DTYPE, _LONG_ROW_DTYPE) and rows_RN.ndim == 2
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, start in enumerate(range(0, len(rows_RN), ROWS_PER_BLOCK)):
            block = io.BytesIO()
            np.save(block, rows_RN[start : start + ROWS_PER_BLOCK], allow_pickle=False)
            # TarInfo sets mtime, uid and gid to 0 and leaves the owner's names empty, so the bytes are always the same.
            member = tarfile.TarInfo(_block_name(name, number))
            member.size = block.tell()
            block.seek(0)
            tar.addfile(member, block)
    return buffer.getvalue()


def _block_name(shard_name: str, number: int) -> str:
    return f"{Path(shard_name).stem}-{number:05d}.npy"


class ShardWriter:
    """Writes rows as shards `<split>/<stem>-000000.tar`, `-000001` and so on, of `rows_per_shard` rows each."""

    def __init__(self, folder: str | Path, split: str, stem: str, *, sequence_length: int, rows_per_shard: int):
        self._folder, self._prefix, self._rows_per_shard = folder, f"{split}/{stem}", rows_per_shard
        self._waiting = [np.empty((0, sequence_length), ROW_DTYPE)]
        self._shards: list[Shard] = []

    def add(self, rows_RN: np.ndarray) -> None:
        self._waiting.append(rows_RN)
        while self._num_waiting >= self._rows_per_shard:
            self._write()

    def close(self) -> list[Shard]:
        """Writes the remaining rows and returns all shards that were written, in order."""
        if self._num_waiting:
            self._write()
        return self._shards

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    def _write(self) -> None:
        rows_RN, *self._waiting = np.split(np.concatenate(self._waiting), [self._rows_per_shard])
        name = f"{self._prefix}-{len(self._shards):06d}.tar"
        content = pack_shard(rows_RN, name)
        write_file(f"{self._folder}/{name}", content)
        sha256 = hashlib.sha256(content).hexdigest()
        self._shards.append(Shard(name=name, rows=len(rows_RN), bytes=len(content), sha256=sha256))


class ShardRows:
    """The rows of one local shard, read whole into memory and verified there.

    So no change of the file while it is open reaches a batch. With a memory map, a file that becomes shorter would end
    the process by SIGBUS, and changed bytes would go unnoticed.

    Raises CorruptShardError if the file is missing, or if its size, checksum, members or number of rows are wrong.
    """

    def __init__(self, path: Path, shard: Shard, sequence_length: int, dtype: np.dtype = ROW_DTYPE):
        content = read_verified(path, shard)
        offsets = _row_offsets(content, shard.name, sequence_length, dtype)
        if len(offsets) != shard.rows:
            raise CorruptShardError(shard.name, f"{path} holds {len(offsets)} rows, the manifest says {shard.rows}")
        self._offsets = offsets // dtype.itemsize
        tokens = np.frombuffer(content, dtype)
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length)

    def read(self, row_indices: np.ndarray) -> np.ndarray:
        """The rows with these indices, uint16 or uint32 [R, N], copied out of the shard."""
        return self._windows[self._offsets[row_indices]]


def _row_offsets(content: bytes, name: str, sequence_length: int, dtype: np.dtype) -> np.ndarray:
    """Byte offset of every row of a shard, int64 [R]. CorruptShardError if a member is not a plain block of rows."""
    blocks = [np.empty(0, np.int64)]
    file = io.BytesIO(content)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for number, member in enumerate(tar):
                if member.type != tarfile.REGTYPE or member.name != _block_name(name, number):
                    raise ValueError(f"member {member.name!r} is not the regular file {_block_name(name, number)}")
                blocks.append(_block_offsets(file, member, sequence_length, dtype))
    except (tarfile.TarError, ValueError) as error:
        raise CorruptShardError(name, str(error)) from error
    return np.concatenate(blocks)


def _block_offsets(file: io.BytesIO, member: tarfile.TarInfo, sequence_length: int, dtype: np.dtype) -> np.ndarray:
    file.seek(member.offset_data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"member {member.name} is not a .npy file of version 1.0")
    shape, fortran_order, found = np.lib.format.read_array_header_1_0(file, max_header_size=1000)
    if found != dtype or fortran_order or len(shape) != 2 or shape[1] != sequence_length:
        raise ValueError(
            f"member {member.name} is an array of {found} with shape {shape}; needed are rows of "
            f"{sequence_length} tokens of {dtype}, in C order"
        )
    row_bytes = sequence_length * dtype.itemsize
    start, end = file.tell(), member.offset_data + member.size
    if start + shape[0] * row_bytes != end or end > file.getbuffer().nbytes or start % dtype.itemsize:
        raise ValueError(f"member {member.name} has {member.size} bytes, which its {shape[0]} rows do not fill")
    return start + np.arange(shape[0]) * row_bytes
