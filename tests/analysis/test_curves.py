"""The points and axes that launch/report.py draws."""

import math
from itertools import pairwise

import pytest

from gmlp_scale.analysis.curves import BOTTOM, MOST_POINTS, TOP, short, stretches, y_axis


def test_long_curves_keep_their_ends_and_their_extremes():
    values = [(step, math.sin(step / 50) + (9 if step == 777 else 0)) for step in range(1, 1002)]
    points = stretches(values)
    assert len(points) <= MOST_POINTS and points[-1].step == 1001
    assert max(point.high for point in points) == values[776][1]
    assert min(point.low for point in points) == min(value for _, value in values)
    assert all(point.low <= point.mean <= point.high for point in points)
    assert [tuple(point) for point in stretches(values[:2])] == [(s, v, v, v) for s, v in values[:2]]


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (3.02, 3.05), (20, 30000), (1e-9, 4e8), (7e-4, 2e-3)])
def test_axes_have_round_numbers_within_them(low, high, is_log):
    axis = y_axis([low, high], is_log=is_log, from_zero=False)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(TOP <= axis.at(value) <= BOTTOM for value in (low, high, *ticks))
    assert len({short(tick) for tick in ticks}) == len(ticks)
    assert all(a < b for a, b in pairwise(ticks))
