"""A rank's pieces of a checkpoint: copied to staging buffers, written to files, and found again by the index in DONE.

Each file is hashed from memory while it is written, and is fsynced. The checksum is XXH3 with 128 bits. It guards
against damage as sha256 would, and is much faster (docs/LOG.md). Neither guards against forgery: whoever can write the
files can write DONE too.

The index is the part of DONE that would grow with the ranks times the tensors. In it, equal shares of neighbouring
ranks are one entry. So FSDP2 needs one or two entries for a tensor on any number of ranks.
"""

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import xxhash
from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gmlp_scale.engine import Engine, Piece

FILE_BYTES = 128 * 2**20  # so that a rank has several files and hashes one while it writes another
NUM_WRITER_THREADS = 3
PIECE_FILE = re.compile(r"rank_(\d{5})_(\d{3,})\.safetensors")


class FileRecord(BaseModel, frozen=True, extra="forbid"):
    bytes: int
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class Shares(NamedTuple):
    """Each of `num_ranks` ranks, from `rank` on, has the next `count` indices in its file of number `file_number`; or
    elements, where the tensor is saved by elements."""

    rank: NonNegativeInt
    num_ranks: PositiveInt
    file_number: NonNegativeInt
    count: PositiveInt


def _shares(entry: Any) -> Any:
    """Format 2 had an entry (file, first, count) for every piece."""
    match entry:
        case [str(file), _, count] if name := PIECE_FILE.fullmatch(file):
            return int(name[1]), 1, int(name[2]), count
    return entry


class TensorRecord(BaseModel, frozen=True, extra="forbid"):
    shape: tuple[NonNegativeInt, ...]
    pieces: list[Annotated[Shares, BeforeValidator(_shares)]]
    """Along dimension 0, in ascending order. A 0-d tensor counts as one index."""
    by_elements: bool = False
    """Whether they are pieces of the flattened tensor instead, as ZeRO's are, and one-dimensional in their files."""

    @property
    def length(self) -> int:
        """How many indices, or elements, the pieces have."""
        return num_units(self.shape, self.by_elements)

    def piece_shape(self, count: int) -> tuple[int, ...]:
        """The shape in its file of a piece with `count` indices or elements."""
        if self.by_elements:
            return (count,)
        return (count, *self.shape[1:]) if self.shape else ()

    @model_validator(mode="after")
    def _check_length(self) -> "TensorRecord":
        if (found := sum(shares.num_ranks * shares.count for shares in self.pieces)) != self.length:
            unit = "elements" if self.by_elements else "indices"
            raise ValueError(f"the pieces hold {found} {unit} of a tensor of shape {self.shape}")
        return self

    def pieces_between(self, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """(file, first, count) of each piece that holds some of the indices, or elements, [first, stop)."""
        start = 0
        for rank, num_ranks, file_number, count in self.pieces:
            end = start + num_ranks * count
            low, high = max(first, start) - start, min(stop, end) - start
            for index in range(low // count, -(-high // count)) if low < high else ():
                yield file_name(rank + index, file_number), start + index * count, count
            start = end


def num_units(shape: Sequence[int], by_elements: bool) -> int:
    """How many elements a tensor has, or how many indices along dimension 0; a 0-d tensor has one."""
    return math.prod(shape if by_elements else shape[:1])


def file_name(rank: int, file_number: int) -> str:
    return f"rank_{rank:05d}_{file_number:03d}.safetensors"


def staged(engine: Engine, buffers: dict[str, Tensor]) -> dict[str, Piece]:
    """Copies this rank's pieces of the engine's state to host memory, and returns the copies once that is done.

    buffers: by key. Empty at first; later calls use them again. Those of pieces on a GPU are pinned.
    """
    pieces, gpu = {}, None
    for key, piece in engine.state():
        source = piece.tensor.detach()
        assert source.dtype == torch.float32 and (piece.by_elements or source.shape[1:] == piece.shape[1:]), key
        buffer = buffers.get(key)
        if buffer is None or buffer.shape != source.shape:
            buffer = torch.empty(source.shape, dtype=torch.float32, device="cpu", pin_memory=source.is_cuda)
            buffers[key] = buffer
        buffer.copy_(source, non_blocking=True)
        gpu = source.device if source.is_cuda else gpu
        pieces[key] = Piece(buffer, piece.shape, piece.first)
    if gpu is not None:
        torch.cuda.current_stream(gpu).synchronize()
    return pieces


def write_pieces(folder: Path, rank: int, pieces: dict[str, Piece]) -> dict[str, Any]:
    """Writes and fsyncs one rank's pieces, a new file about every FILE_BYTES. Makes the folder, but none above it: the
    run folder may have been moved away.

    Returns its receipt, JSON-able: each file's FileRecord, and its layout_of the pieces.
    """
    contents, places, num_bytes = {}, {}, 0
    for key, piece in pieces.items():
        file_number, count = num_bytes // FILE_BYTES, len(piece.tensor) if piece.tensor.ndim else 1
        places[key] = (list(piece.shape), piece.by_elements, file_number, piece.first, count)
        if count:
            contents.setdefault(file_name(rank, file_number), {})[key] = piece.tensor
            num_bytes += piece.tensor.nbytes

    def write(name: str) -> dict[str, Any]:
        return write_safetensors(contents[name], folder / name).model_dump()

    folder.mkdir(exist_ok=True)
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
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def layout_of(places: dict[str, tuple[list[int], bool, int, int, int]]) -> dict[str, Any]:
    """One rank's (shape, by_elements, file_number, first, count) by key, as columns: rank 0 reads those of all ranks,
    key by key."""
    shapes, by_elements, *columns = zip(*places.values(), strict=True) if places else [()] * 5
    return {"shapes": json.dumps(list(zip(places, shapes, by_elements, strict=True))), "columns": columns}


def merged(layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """DONE's `tensors` from the layouts of all ranks."""
    forms, pieces = {}, {}
    parsed = functools.cache(json.loads)  # FSDP2's ranks have the same keys and shapes: they are parsed once
    for rank, layout in enumerate(layouts):
        for (key, *form), file_number, first, count in zip(parsed(layout["shapes"]), *layout["columns"], strict=True):
            of_others = forms.setdefault(key, form)
            assert of_others == form, f"{key} has shape {of_others}, and {form} on rank {rank}"
            pieces.setdefault(key, [])
            if count:
                pieces[key].append((first, rank, file_number, count))
    tensors = {}
    for key, (shape, by_elements) in forms.items():
        shares = _joined(key, num_units(shape, by_elements), sorted(pieces[key]))
        tensors[key] = {"shape": shape, "pieces": shares} | ({"by_elements": True} if by_elements else {})
    return tensors


def _joined(key: str, length: int, pieces: list[tuple[int, int, int, int]]) -> list[list[int]]:
    """The tensor's Shares, from all (first, rank, file_number, count), ascending."""
    joined, stop = [], 0
    for first, rank, file_number, count in pieces:
        assert first == stop, f"{key}: the ranks' pieces do not cover the tensor once: {pieces}"
        stop += count
        if joined and joined[-1] == [rank - joined[-1][1], joined[-1][1], file_number, count]:
            joined[-1][1] += 1
        else:
            joined.append([rank, 1, file_number, count])
    assert stop == length, f"{key}: the ranks' pieces do not cover the tensor once: {pieces}"
    return joined
