"""A number that changes at given steps: the rows of a step, or the fraction of positions that are masked."""

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BeforeValidator


class Piecewise:
    """A number for every step. Its sums over many steps are found without walking through them.

    written: the number, or a list of [from_step, number]. Each number holds from that many finished steps on; the first
    from_step is 0.
    """

    def __init__(self, written: float | Sequence[Sequence[float]]):
        pieces = [(0, written)] if isinstance(written, int | float) else written
        self.starts = tuple(start for start, _ in pieces)
        """The steps from which on each of `values` holds."""
        self.values = tuple(value for _, value in pieces)
        self._sums = [0]  # over all steps before each start
        for (start, stop), value in zip(pairwise(self.starts), self.values, strict=False):
            self._sums.append(self._sums[-1] + (stop - start) * value)

    @property
    def last(self) -> float:
        """The number at the end."""
        return self.values[-1]

    def at(self, step: int) -> float:
        """The number of the step that comes after `step` finished ones."""
        return self.values[bisect(self.starts, step) - 1]

    def before(self, step: int) -> float:
        """The sum over the first `step` steps."""
        piece = bisect(self.starts, step) - 1
        return self._sums[piece] + (step - self.starts[piece]) * self.values[piece]

    def steps_within(self, total: float) -> int:
        """The most steps whose numbers, all positive, add up to at most `total`."""
        piece = bisect(self._sums, total) - 1
        return self.starts[piece] + int((total - self._sums[piece]) // self.values[piece])

    def map(self, function: Callable[[float], float]) -> "Piecewise":
        return Piecewise(list(zip(self.starts, map(function, self.values), strict=True)))

    def times(self, other: "Piecewise") -> "Piecewise":
        """The product of both at every step."""
        starts = sorted({*self.starts, *other.starts})
        return Piecewise([(start, self.at(start) * other.at(start)) for start in starts])

    def shown(self, show: Callable[[float], str] = "{:,}".format) -> str:
        """In words: 32, then 64 from step 1,000."""
        later = zip(self.starts[1:], self.values[1:], strict=True)
        return ", ".join([show(self.values[0]), *(f"then {show(value)} from step {start:,}" for start, value in later)])


def number_or_pieces(is_number: Callable[[Any], bool], needed: str) -> BeforeValidator:
    """Checks a recipe's field that Piecewise reads.

    is_number: whether a value is a valid number. needed: what a number must be, in words.
    """

    def checked(value: Any) -> Any:
        if is_number(value):
            return value
        pairs = value if isinstance(value, list | tuple) and len(value) > 1 else [()]
        if all(isinstance(pair, list | tuple) and len(pair) == 2 and is_number(pair[1]) for pair in pairs):
            starts = [start for start, _ in pairs]
            if all(type(start) is int for start in starts) and starts == sorted({0, *starts}):
                return value
        raise ValueError(f"{needed}, or a list of at least two [from_step, number] with such numbers, from step 0 on")

    return BeforeValidator(checked)
