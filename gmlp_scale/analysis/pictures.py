"""Draws what arrays.py computes. Each function returns a matplotlib figure."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from gmlp_scale.analysis.arrays import PowerLaw, RunSize
from gmlp_scale.train.filters import figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_matrices(matrices: Mapping[int, np.ndarray]) -> "Figure":
    """The spatial matrices of some blocks, by the block's number, as in the paper's Figure 9."""
    figure, grid = figure_of(len(matrices), min(4, len(matrices)), width=4.5, height=4)
    for axes, (number, matrix_NN) in zip(grid, matrices.items(), strict=True):
        limit = np.abs(matrix_NN).max()
        image = axes.imshow(matrix_NN, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.set(title=f"block {number}", xlabel="from position", ylabel="to position")
        figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def draw_image_filters(matrices: Mapping[int, np.ndarray]) -> "Figure":
    """What W gives some patches of an image, as in the paper's Figure 3: a row for each block, by its number.

    The patches are nine that are spread over the image. Each is framed in its picture.
    """
    from matplotlib.patches import Rectangle

    side = isqrt(len(next(iter(matrices.values()))))
    places = (side // 6, side // 2, side - 1 - side // 6)
    patches = [row * side + column for row in places for column in places]
    figure, grid = figure_of(len(matrices) * len(patches), len(patches), width=1.2, height=1.3)
    shown = ((number, matrix_NN[patch], patch) for number, matrix_NN in matrices.items() for patch in patches)
    for axes, (number, filter_N, patch) in zip(grid, shown, strict=True):
        limit = np.abs(filter_N).max()
        axes.imshow(filter_N.reshape(side, side), cmap="RdBu_r", vmin=-limit, vmax=limit)
        axes.add_patch(Rectangle((patch % side - 0.5, patch // side - 0.5), 1, 1, fill=False))
        axes.set_title(f"block {number}, patch {patch}", fontsize=5)
        axes.set_axis_off()
    return figure


def draw_attention(maps: Mapping[str, np.ndarray], tokens: Sequence[str]) -> "Figure":
    """Attention maps by title, without padding. The token on the left attends to the token below (appendix D)."""
    side = max(4.0, 0.22 * len(tokens))
    figure, grid = figure_of(len(maps), min(3, len(maps)), width=side + 1, height=side)
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
    figure, (axes,) = figure_of(1, 1, width=7, height=4.5)
    for size in sizes:
        label = f"{size.name} ({size.perplexity:.2f}, step {size.step:,})"
        axes.plot(size.num_parameters, size.perplexity, "o", label=label)
    ends = np.array([min(size.num_parameters for size in sizes), max(size.num_parameters for size in sizes)])
    axes.plot(ends, law.at(ends), "--", color="grey", label=f"{law.coefficient:.4g} × parameters^{law.exponent:.4f}")
    axes.set(xlabel="parameters", ylabel="held-out perplexity", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure
