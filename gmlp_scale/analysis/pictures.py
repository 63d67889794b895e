"""Draws what arrays.py computes. Each function returns a matplotlib figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gmlp_scale.analysis.arrays import PowerLaw, RunSize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLUMNS = 6


def draw_filters(filters: Sequence[np.ndarray]) -> "Figure":
    """A plot for each block, as in the paper's Figure 4. The vertical scales differ."""
    num_columns = min(NUM_COLUMNS, len(filters))
    figure, grid = _figure(len(filters), num_columns, width=2.2, height=1.5)
    for number, (axes, filter_N) in enumerate(zip(grid, filters, strict=True)):
        axes.plot(filter_N, linewidth=0.8)
        axes.set_title(f"block {number}", fontsize=8)
        axes.tick_params(labelsize=6)
    return figure


def draw_matrices(matrices: Mapping[int, np.ndarray]) -> "Figure":
    """The spatial matrices of some blocks, by the block's number, as in the paper's Figure 9."""
    figure, grid = _figure(len(matrices), min(4, len(matrices)), width=4.5, height=4)
    for axes, (number, matrix_NN) in zip(grid, matrices.items(), strict=True):
        limit = np.abs(matrix_NN).max()
        image = axes.imshow(matrix_NN, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set(title=f"block {number}", xlabel="from position", ylabel="to position")
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def draw_attention(maps: Mapping[str, np.ndarray], tokens: Sequence[str]) -> "Figure":
    """Attention maps by title, without padding. The token on the left attends to the token below (appendix D)."""
    side = max(4.0, 0.22 * len(tokens))
    figure, grid = _figure(len(maps), min(3, len(maps)), width=side + 1, height=side)
    for axes, (title, map_NN) in zip(grid, maps.items(), strict=True):
        image = axes.imshow(map_NN[: len(tokens), : len(tokens)], cmap="viridis", vmin=0)
        # A token may be a dollar sign, which matplotlib would take for the start of a formula.
        axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(tokens)), tokens, fontsize=7, parse_math=False)
        axes.set_title(title)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def draw_scaling(sizes: Sequence[RunSize], law: PowerLaw) -> "Figure":
    """Perplexity against parameters, on logarithmic axes, with the fitted law, as in the paper's Figure 8."""
    figure, (axes,) = _figure(1, 1, width=7, height=4.5)
    for size in sizes:
        label = f"{size.name} ({size.perplexity:.2f}, step {size.step:,})"
        axes.plot(size.num_parameters, size.perplexity, "o", label=label)
    ends = np.array([min(size.num_parameters for size in sizes), max(size.num_parameters for size in sizes)])
    axes.plot(ends, law.at(ends), "--", color="grey", label=f"{law.coefficient:.4g} × parameters^{law.exponent:.4f}")
    axes.set(xlabel="parameters", ylabel="held-out perplexity", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def _figure(num_plots: int, num_columns: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    """An empty figure with this many plots; the width and height of each are in inches."""
    from matplotlib.figure import Figure

    num_rows = -(-num_plots // num_columns)
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten().tolist()
    for unused in grid[num_plots:]:
        unused.remove()
    return figure, grid[:num_plots]
