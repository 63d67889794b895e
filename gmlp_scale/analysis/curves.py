"""Curves as SVG: axes with round numbers, and paths of as many points as a screen can show.

A chart is a WIDTH x HEIGHT box; y runs downwards, as in SVG.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 408, 10, 212
"""Where the axes end; the numbers beside them stand outside."""
MOST_POINTS = 200
"""The most points of a drawn curve."""
LEAST, MOST = 1e-150, 1e150
"""Between these sizes a value can be drawn: sums, products and ratios of two stay finite."""


class Point(NamedTuple):
    """A stretch of a curve: the last step in it, and the mean, lowest and highest of its values."""

    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Axis:
    """From `low` at `start` to `high` at `stop`, in units of the chart."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        scaled, low, high = (math.log(x) if self.is_log else x for x in (value, self.low, self.high))
        return self.start + (scaled - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers on the axis, some three to seven."""
        if not self.is_log or self.high / self.low < 4:
            return _round_numbers(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            ticks = [d * 10.0**power for power in powers for d in digits if self.low <= d * 10.0**power <= self.high]
            if len(ticks) <= 7:
                return ticks
        return ticks[:: math.ceil(len(ticks) / 7)]


def is_drawable(value: float, *, is_log: bool) -> bool:
    """Whether an axis can show a value. NaN and infinity cannot be drawn."""
    return LEAST <= (value if is_log else abs(value)) <= MOST or (value == 0 and not is_log)


def y_axis(values: Sequence[float], *, is_log: bool, from_zero: bool) -> Axis:
    """An axis on which all the values lie, which are drawable."""
    low, high = min(values), max(values)
    if is_log:
        margin = max((high / low) ** 0.04, 1.01)
        return Axis(low / margin, high * margin, BOTTOM, TOP, is_log=True)
    if from_zero:
        low = min(low, 0.0)
    margin = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low if from_zero and low == 0.0 else low - margin, high + margin, BOTTOM, TOP)


def stretches(values: Sequence[tuple[int, float]]) -> list[Point]:
    """Divides the (step, value) pairs into at most MOST_POINTS stretches of equal length; one each if they are few."""
    length = math.ceil(len(values) / MOST_POINTS)
    points = []
    for first in range(0, len(values), length):
        inside = [value for _, value in values[first : first + length]]
        last_step = values[min(first + length, len(values)) - 1][0]
        points.append(Point(last_step, sum(inside) / len(inside), min(inside), max(inside)))
    return points


def line(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    """The `d` of an SVG path through (x, y) points. With round line ends a single point becomes a dot."""
    return "M" + _places(points, x, y) + ("h0" if len(points) == 1 else "")


def band(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """The `d` of the area between the lowest and the highest values."""
    highs = [(point.step, point.high) for point in points]
    lows = [(point.step, point.low) for point in reversed(points)]
    return f"M{_places(highs + lows, x, y)}Z"


def _places(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    return "L".join(f"{x.at(across):.1f} {y.at(value):.1f}" for across, value in points)


def short(value: float) -> str:
    """A number of few characters: 1.5M, 20k, 0.03."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def _round_numbers(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
