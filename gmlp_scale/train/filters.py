"""The spatial filters of a gMLP: what W gives the middle position of a row, as in the paper's Figure 4.

Shape suffixes: N positions.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from gmlp_scale.models.layers import toeplitz

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLUMNS = 6
_SPATIAL_WEIGHT = re.compile(r"blocks\.(\d+)\.gating\.weight")


def spatial_filters(weights: Iterable[tuple[str, Tensor]]) -> list[np.ndarray]:
    """filter_N of every block, in order; [] for a model without spatial weights.

    weights: all the model's, float32, by name.
    """
    filters = {}
    for name, weight in weights:
        if found := _SPATIAL_WEIGHT.fullmatch(name):
            filters[int(found[1])] = middle_row(spatial_matrix(weight)).copy()
    return [filters[number] for number in sorted(filters)]


def spatial_matrix(weight: Tensor) -> np.ndarray:
    """W_NN of a gating's weight, which is W itself or a Toeplitz W's vector."""
    return (toeplitz(weight) if weight.ndim == 1 else weight).detach().numpy()


def middle_row(matrix_NN: np.ndarray) -> np.ndarray:
    """The spatial filter_N."""
    return matrix_NN[len(matrix_NN) // 2]


def draw_filters(filters: Sequence[np.ndarray]) -> "Figure":
    """A plot for each block. The vertical scales differ."""
    figure, grid = figure_of(len(filters), min(NUM_COLUMNS, len(filters)), width=2.2, height=1.5)
    for number, (axes, filter_N) in enumerate(zip(grid, filters, strict=True)):
        axes.plot(filter_N, linewidth=0.8)
        axes.set_title(f"block {number}", fontsize=8)
        axes.tick_params(labelsize=6)
    return figure


def figure_of(num_plots: int, num_columns: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """An empty figure with this many plots; the width and height of each are in inches."""
    from matplotlib.figure import Figure

    num_rows = -(-num_plots // num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in grid[num_plots:]:
        unused.remove()
    return figure, grid[:num_plots]
