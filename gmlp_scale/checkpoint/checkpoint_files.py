"""Writes and checks the files of a checkpoint. Each is hashed from memory while it is written, and is fsynced.

The checksum is XXH3 with 128 bits. It guards against damage as sha256 would, and is much faster (docs/LOG.md). Neither
guards against forgery: whoever can write the files can write DONE too.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gmlp_scale.checkpoint.checkpoint_index import file_name, layout_of
from gmlp_scale.engine import Piece

FILE_BYTES = 128 * 2**20  # so that a rank has several files and hashes one while it writes another
NUM_WRITER_THREADS = 3
READ_BYTES = 2**20  # small enough to stay in a core's cache from the read to the hash


class FileRecord(BaseModel, frozen=True, extra="forbid"):
    bytes: int
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


def write_pieces(folder: Path, rank: int, pieces: dict[str, Piece]) -> dict[str, Any]:
    """Writes and fsyncs one rank's pieces, a new file about every FILE_BYTES.

    Returns its receipt, JSON-able: each file's FileRecord, and its layout_of the pieces.
    """
    contents, places, num_bytes = {}, {}, 0
    for key, piece in pieces.items():
        file_number, count = num_bytes // FILE_BYTES, len(piece.tensor) if piece.shape else 1
        places[key] = (list(piece.shape), file_number, piece.first, count)
        if count:
            contents.setdefault(file_name(rank, file_number), {})[key] = piece.tensor
            num_bytes += piece.tensor.nbytes

    def write(name: str) -> dict[str, Any]:
        return write_safetensors(contents[name], folder / name).model_dump()

    with ThreadPoolExecutor(NUM_WRITER_THREADS) as pool:
        files = dict(zip(contents, pool.map(write, contents), strict=True))
    fsync(folder)
    return {"files": files, "layout": layout_of(places)}


def write_safetensors(tensors: dict[str, Tensor], path: Path) -> FileRecord:
    """Writes float32 tensors in host memory as a safetensors file and fsyncs it.

    The format: the header's length in 8 bytes, a JSON header padded with spaces to 8 bytes, the tensors. The
    `safetensors` package writes the same, but cannot hash the bytes on their way.

    ValueError names a tensor that is not finite; OSError comes from the disk.
    """
    header, num_bytes = {}, 0
    for key, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), key
        offsets = [num_bytes, num_bytes := num_bytes + tensor.nbytes]
        header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = xxhash.xxh3_128()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            checksum.update(part)
            file.write(part)
        for key, tensor in tensors.items():
            if not torch.stack(tensor.aminmax()).isfinite().all():
                raise ValueError(f"{key} is not finite, so training has diverged")
            content = tensor.numpy().data
            checksum.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(bytes=8 + len(text) + num_bytes, xxh3_128=checksum.hexdigest())


def file_problem(path: Path, record: FileRecord, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """How a file differs from its record, or its tensors from `shapes`; None if nothing differs."""
    try:
        if (num_bytes := path.stat().st_size) != record.bytes:
            return f"{path.name} has {num_bytes} of {record.bytes} bytes"
        if file_checksum(path) != record.xxh3_128:
            return f"{path.name} does not have its xxh3_128 checksum"
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no dict)
            found = {key: tuple(piece.get_shape()) for key, piece in slices.items() if piece.get_dtype() == "F32"}
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    except SafetensorError as error:
        return f"{path.name}: {error}"
    if wrong := {key for key, _ in found.items() ^ shapes.items()}:
        return f"{path.name} does not hold {min(wrong)} as DONE says"
    return None


def file_checksum(path: Path) -> str:
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            checksum.update(buffer[:num_read])
    return checksum.hexdigest()


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
