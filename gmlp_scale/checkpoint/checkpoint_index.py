"""Where each tensor of a checkpoint lies: the part of DONE that would grow with the ranks times the tensors.

Equal shares of neighbouring ranks are one entry. So FSDP2 needs one or two entries for a tensor on any number of ranks.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, NonNegativeInt, PositiveInt, model_validator

PIECE_FILE = re.compile(r"rank_(\d{5})_(\d{3,})\.safetensors")


class Shares(NamedTuple):
    """Each of `num_ranks` ranks, from `rank` on, has the next `count` indices in its file of number `file_number`."""

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

    @property
    def length(self) -> int:
        return self.shape[0] if self.shape else 1

    @model_validator(mode="after")
    def _check_length(self) -> "TensorRecord":
        if (found := sum(shares.num_ranks * shares.count for shares in self.pieces)) != self.length:
            raise ValueError(f"the pieces hold {found} indices of a tensor of shape {self.shape}")
        return self

    def pieces_between(self, first: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """(file, first, count) of each piece that holds some of the indices [first, stop)."""
        start = 0
        for rank, num_ranks, file_number, count in self.pieces:
            end = start + num_ranks * count
            low, high = max(first, start) - start, min(stop, end) - start
            for index in range(low // count, -(-high // count)) if low < high else ():
                yield file_name(rank + index, file_number), start + index * count, count
            start = end


def file_name(rank: int, file_number: int) -> str:
    return f"rank_{rank:05d}_{file_number:03d}.safetensors"


def layout_of(places: dict[str, tuple[list[int], int, int, int]]) -> dict[str, Any]:
    """One rank's (shape, file_number, first, count) by key, as columns: rank 0 reads those of all ranks, key by key."""
    shapes, *columns = zip(*places.values(), strict=True) if places else [()] * 4
    return {"shapes": json.dumps(list(zip(places, shapes, strict=True))), "columns": columns}


def merged(layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """DONE's `tensors` from the layouts of all ranks."""
    shapes, pieces = {}, {}
    parsed = functools.cache(json.loads)  # FSDP2's ranks have the same keys and shapes: they are parsed once
    for rank, layout in enumerate(layouts):
        for (key, shape), file_number, first, count in zip(parsed(layout["shapes"]), *layout["columns"], strict=True):
            assert shapes.setdefault(key, shape) == shape, f"{key} has shape {shapes[key]}, and {shape} on rank {rank}"
            pieces.setdefault(key, [])
            if count:
                pieces[key].append((first, rank, file_number, count))
    return {key: {"shape": shape, "pieces": _joined(key, shape, sorted(pieces[key]))} for key, shape in shapes.items()}


def _joined(key: str, shape: list[int], pieces: list[tuple[int, int, int, int]]) -> list[list[int]]:
    """The tensor's Shares, from all (first, rank, file_number, count), ascending."""
    joined, stop = [], 0
    for first, rank, file_number, count in pieces:
        assert first == stop, f"{key}: the ranks' pieces do not cover the tensor once: {pieces}"
        stop += count
        if joined and joined[-1] == [rank - joined[-1][1], joined[-1][1], file_number, count]:
            joined[-1][1] += 1
        else:
            joined.append([rank, 1, file_number, count])
    assert stop == (shape[0] if shape else 1), f"{key}: the ranks' pieces do not cover the tensor once: {pieces}"
    return joined
