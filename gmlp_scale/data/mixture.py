"""Which source each row of training comes from: a pure function of the row's position in the order of training.

The rows take their sources by a pattern that repeats. In it the next row comes from the source whose row is due first,
and no row comes before its time. So after any number of rows each source has had its share of them to less than one
row, for any number of sources. Where a source starts or ends, another pattern begins.
"""

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from math import gcd, lcm
from typing import Self

import numpy as np
from pydantic import BaseModel, Field, model_serializer

from gmlp_scale.data.hashing import hash64
from gmlp_scale.fields import Count, CountFrom0, Positive
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import Place

_SOURCES = 4  # the first word of a source's key; order.py and masking.py begin their keys with 1, 2 and 3
_LONGEST_PATTERN = 1_000_000  # takes under a second to find, and 16 MB


class SourceConfig(BaseModel, frozen=True, extra="forbid"):
    """One of several folders of shards that a run draws from."""

    shards: Place[str]
    """Folder that data_prep/tokenize_corpus.py wrote: a path or a URL that fsspec opens."""
    weight: Positive
    """The source's share of a step's rows is this weight over the sum of the weights of the step's sources. The shares
    must be whole numbers of every million rows or fewer: 0.7 and 0.3, or 1563 and 241. [no unit]"""
    name: str | None = Field(default=None, pattern=r"^\w[\w.-]*$")
    """The source in tags and records, as in data/epoch/NAME. null: the last part of its folder's path, or as many parts
    as set it apart from the others, such as own/shards."""
    from_step: CountFrom0 = 0
    """The source gives rows from this many finished steps on. [steps]"""
    until_step: Count | None = None
    """The source gives no rows from this many finished steps on; null for the run's end. [steps]"""

    @model_serializer(mode="wrap")
    def _with_given_name_alone(self, dump: Callable[[Self], dict]) -> dict:
        """As configs were written before a source could have a name."""
        fields = dump(self)
        return fields if self.name else {field: value for field, value in fields.items() if field != "name"}

    def is_active(self, step: int) -> bool:
        """Whether the batch after `step` finished steps has a share of its rows."""
        return self.from_step <= step and (self.until_step is None or step < self.until_step)


def with_names(sources: Sequence[SourceConfig]) -> tuple[SourceConfig, ...]:
    """The sources, each with its name. Two are alike only where the folders or the given names are."""
    paths = [
        [source.name] if source.name else [part for part in source.shards.partition("?")[0].split("/") if part]
        for source in sources
    ]
    named = []
    for place, (source, own) in enumerate(zip(sources, paths, strict=True)):
        others = paths[:place] + paths[place + 1 :]
        lengths = (n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others))
        named.append(source.model_copy(update={"name": "/".join(own[-next(lengths, len(own)) :])}))
    return tuple(named)


def source_seed(seed: int, place: int) -> int:
    """The seed of the source at this place of the list. The first one draws as if it were alone."""
    return int(hash64(_SOURCES, seed, place)[0]) if place else seed


class Pattern:
    """The sources of an endless sequence of rows, in these shares. A weight of 0 gives a source no rows."""

    def __init__(self, weights: Sequence[float]):
        shares = _whole_numbers(weights)
        self._shares = np.array(shares)
        """Rows of each source in one repetition."""
        self._sources = _by_deadline(shares)
        self._length = len(self._sources)
        self._rows_before = np.empty(self._length, np.int64)  # of the same source, in the same repetition
        for source, share in enumerate(self._shares):
            self._rows_before[self._sources == source] = np.arange(share)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of the row at each position, and how many rows of that source come before it; int64 [P]."""
        repetitions, places = np.divmod(np.asarray(positions, np.int64), self._length)
        sources = self._sources[places]
        return sources, repetitions * self._shares[sources] + self._rows_before[places]

    def counts(self, num_rows: int) -> np.ndarray:
        """Rows of each source among the first `num_rows`, int64 [K]."""
        repetitions, rest = divmod(num_rows, self._length)
        return repetitions * self._shares + np.bincount(self._sources[:rest], minlength=len(self._shares))

    def num_rows_of(self, rows_of_source: Sequence[int]) -> int:
        """How many rows there are until a source would need more than it has."""
        firsts_missing = []
        for source, (num_rows, share) in enumerate(zip(rows_of_source, self._shares.tolist(), strict=True)):
            if share:
                places = np.flatnonzero(self._sources == source)
                firsts_missing.append(num_rows // share * self._length + int(places[num_rows % share]))
        return min(firsts_missing)


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the weights' ratios; a weight is the decimal number that it is written as."""
    assert any(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * denominator) for weight in exact]
    return [number // gcd(*numbers) for number in numbers]


def _by_deadline(shares: Sequence[int]) -> np.ndarray:
    """The source of each row of one repetition, int64 [the shares' sum].

    Row j of a source with the share w of the rows may come once j / w rows went before it, and is due at (j + 1) / w
    rows. All deadlines are met: earliest deadline first does so whenever any order can.
    """
    length, taken = sum(shares), [0] * len(shares)
    not_yet = [(0, source) for source, share in enumerate(shares) if share]  # (row from which it may come, source)
    due: list[tuple[int, int]] = []  # (deadline, source)
    sources = np.empty(length, np.int64)
    for row in range(length):
        while not_yet and not_yet[0][0] <= row:
            source = heappop(not_yet)[1]
            heappush(due, (-(-(taken[source] + 1) * length // shares[source]), source))
        sources[row] = source = heappop(due)[1]
        taken[source] += 1
        heappush(not_yet, (taken[source] * length // shares[source], source))
    return sources


class Mixture:
    """The sources of a run's rows. A step's batch has all its rows from one pattern.

    Memory: about 16 bytes per row of each pattern.
    """

    def __init__(self, sources: Sequence[SourceConfig], batch_sizes: Piecewise):
        self._batch_sizes = batch_sizes
        starts = changing_steps(sources)
        self._patterns = [Pattern(_weights_at(sources, step)) for step in starts]
        self._first_rows = [batch_sizes.before(step) for step in starts]
        self._counts = [np.zeros(len(sources), np.int64)]
        for (first, stop), pattern in zip(pairwise(self._first_rows), self._patterns, strict=False):
            self._counts.append(self._counts[-1] + pattern.counts(stop - first))

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row, and how many rows of that source the run has had before; int64 [P].

        positions: the rows' places in the order of training, through all steps.
        """
        parts = np.searchsorted(self._first_rows, positions, side="right") - 1
        sources, rows_before = np.empty((2, len(positions)), np.int64)
        for part in np.unique(parts).tolist():
            own = parts == part
            sources[own], before = self._patterns[part].locate(positions[own] - self._first_rows[part])
            rows_before[own] = self._counts[part][sources[own]] + before
        return sources, rows_before

    def counts(self, step: int) -> np.ndarray:
        """Rows that each source has given before the batch of `step`, int64 [K]."""
        num_rows = self._batch_sizes.before(step)
        part = bisect(self._first_rows, num_rows) - 1
        return self._counts[part] + self._patterns[part].counts(num_rows - self._first_rows[part])


def changing_steps(sources: Iterable[SourceConfig]) -> list[int]:
    """The steps from which on other sources are active, beginning with 0."""
    return sorted({0}.union(*({source.from_step, source.until_step or 0} for source in sources)))


def _weights_at(sources: Iterable[SourceConfig], step: int) -> list[float]:
    return [source.weight if source.is_active(step) else 0.0 for source in sources]


def mixture_mistakes(sources: Sequence[SourceConfig], num_steps: int) -> Iterable[str]:
    names = [source.name for source in sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.shards: found {names.count(name)} sources named {name}; needed: other folders, or another `name`"
    for source in sources:
        if source.from_step >= num_steps:
            found = f"{source.name} has from_step {source.from_step}"
            yield f"data.shards: {found}; needed: below train.num_steps = {num_steps}"
        if source.until_step is not None and not source.from_step < source.until_step < num_steps:
            needed = f"above from_step = {source.from_step} and below train.num_steps = {num_steps}, or null"
            yield f"data.shards: {source.name} has until_step {source.until_step}; needed: {needed}"
    for step in changing_steps(sources):
        weights = [weight for weight in _weights_at(sources, step) if weight]
        if not weights and step < num_steps:
            yield f"data.shards: no source has rows for step {step}; needed: a source with from_step at most {step}"
        elif weights and (length := sum(_whole_numbers(weights))) > _LONGEST_PATTERN:
            shares = ", ".join(f"{weight:.15g}" for weight in weights)
            yield (
                f"data.shards: shares of {shares} are whole only after {length:,} rows; needed: after at most "
                f"{_LONGEST_PATTERN:,}, so weights with fewer digits"
            )
