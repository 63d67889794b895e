"""Pictures of what models learned and the numbers behind them: spatial weights, tiny attention, perplexity by size.

Shape suffixes: N positions, D width, K head width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gmlp_scale.analysis.curves import is_drawable
from gmlp_scale.analysis.run_records import curve
from gmlp_scale.checkpoint.saved_run import read_recipe
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.models import kinds_with
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.train.filters import figure_of, spatial_matrix
from gmlp_scale.train.sinks import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def spatial_matrices(trained: TrainedModel) -> list[np.ndarray]:
    """W_NN of every block's spatial projection, float32. TrainedModelError if the model has none."""
    if not trained.config.has_spatial_filters:
        kinds = kinds_with("has_spatial_filters")
        raise TrainedModelError(f"{trained.place} has no spatial projections: give a model of kind {kinds}")
    weights = [trained.weights[f"blocks.{number}.gating.weight"] for number in range(trained.config.num_blocks)]
    return [spatial_matrix(weight) for weight in weights]


@torch.no_grad()
def attention_maps(trained: TrainedModel, ids: Sequence[int]) -> list[np.ndarray]:
    """softmax_NN of every block's tiny attention on one row: a position's attention to all positions sums to 1.

    A finetuned model's row is padded to the length of its finetuning, so N may be more than the number of ids.

    Raises:
        TrainedModelError: the model has no tiny attention, or the row is too long for it.
    """
    model, num_positions = trained.build(), trained.row_length or len(ids)
    if not trained.config.has_spatial_filters or model.blocks[0].attention is None:
        raise TrainedModelError(f"{trained.place} has no tiny attention: give an aMLP")
    if len(ids) > num_positions or num_positions > model.sequence_length:
        longest = trained.row_length or model.sequence_length
        raise TrainedModelError(
            f"the texts make {len(ids)} tokens; {trained.place} takes at most {longest}: shorten them"
        )
    ids_1N = torch.tensor([[*ids, *[PAD_ID] * (num_positions - len(ids))]])
    x_1ND, is_token_1N, maps = model.embedding(ids_1N), model.tokens(ids_1N != PAD_ID), []
    for block in model.blocks:
        maps.append(block.attention_weights(x_1ND, is_token_1N)[0, 0].numpy())
        x_1ND = block(x_1ND, is_token_1N)
    return maps


def first_half_maximum(maps: Sequence[np.ndarray]) -> np.ndarray:
    """The maximum of each pair's attention over the first half of the blocks (the paper's appendix D)."""
    return np.max(maps[: math.ceil(len(maps) / 2)], axis=0)


def attention_by_title(
    trained: TrainedModel, ids: Sequence[int], block_numbers: Sequence[int] | None
) -> dict[str, np.ndarray]:
    """`attention_maps` of the blocks with these numbers; without numbers, the maximum over the first half of them."""
    maps = attention_maps(trained, ids)
    if block_numbers is None:
        return {"first half of the blocks": first_half_maximum(maps)}
    return {f"block {number}": map_NN for number, map_NN in chosen_blocks(maps, block_numbers).items()}


def chosen_blocks(of_blocks: Sequence[np.ndarray], numbers: Sequence[int]) -> dict[int, np.ndarray]:
    """The items of the blocks with these numbers, which count from 0. TrainedModelError if a block does not exist."""
    if absent := [number for number in numbers if not 0 <= number < len(of_blocks)]:
        raise TrainedModelError(f"no block {', '.join(map(str, absent))}; there are 0 to {len(of_blocks) - 1}")
    return {number: of_blocks[number] for number in numbers}


def sentence_pair(trained: TrainedModel, text_a: str, text_b: str) -> tuple[list[int], list[str]]:
    """Ids of `<cls> A <sep> B <sep>`, as in finetuning, and a label for each token."""
    tokenizer = trained.tokenizer()
    ids = [CLS_ID, *tokenizer.encode(text_a), SEP_ID, *tokenizer.encode(text_b), SEP_ID]
    return ids, [tokenizer.decode([id]).strip() for id in ids]


@dataclass(frozen=True)
class RunSize:
    name: str
    num_parameters: int
    step: int
    """The step of the last held-out evaluation."""
    perplexity: float


def run_sizes(run_folders: Sequence[str | Path]) -> list[RunSize]:
    """Parameters and last held-out perplexity of each run.

    Raises:
        TrainedModelError: a folder holds no run; or some runs have no finite perplexity: it names all of them.
    """
    sizes, problems = [], []
    for run_folder in run_folders:
        recipe = read_recipe(run_folder)
        perplexities = curve(read_metrics(f"{run_folder}/metrics.jsonl"), "eval/perplexity")
        if not perplexities:
            problems.append(f"{run_folder} has no held-out evaluation in metrics.jsonl: train it further")
        elif not is_drawable(perplexities[-1][1], is_log=True):
            problems.append(f"{run_folder} has the perplexity {perplexities[-1][1]}: leave it out")
        else:
            sizes.append(RunSize(recipe.name, count_parameters(recipe), *perplexities[-1]))
    if problems:
        raise TrainedModelError("; ".join(problems))
    return sizes


@dataclass(frozen=True)
class PowerLaw:
    """y = coefficient * x ** exponent."""

    coefficient: float
    exponent: float

    def at(self, x: np.ndarray) -> np.ndarray:
        return self.coefficient * x**self.exponent


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Least squares of log y over log x. TrainedModelError if all x are equal."""
    if len(set(x)) < 2:
        raise TrainedModelError(f"a power law needs two runs of different sizes; found {', '.join(map(str, set(x)))}")
    exponent, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return PowerLaw(float(np.exp(intercept)), float(exponent))


def scaling_law(sizes: Sequence[RunSize]) -> tuple[PowerLaw, str]:
    """Perplexity over parameters (the paper's Figure 8), and both as a table; raises as fit_power_law."""
    law = fit_power_law([size.num_parameters for size in sizes], [size.perplexity for size in sizes])
    lines = [
        f"{of.name:24} {of.num_parameters:>15,} parameters  perplexity {of.perplexity:10.3f} at step {of.step:,}"
        for of in sizes
    ]
    return law, "\n".join([*lines, f"perplexity = {law.coefficient:.4g} x parameters ^ {law.exponent:.4f}"])


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
