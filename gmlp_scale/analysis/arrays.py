"""The numbers behind the pictures: spatial filters and matrices, tiny attention, perplexity against parameters.

Shape suffixes: N positions, D width, K head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gmlp_scale.analysis.run_records import curve, read_lines
from gmlp_scale.checkpoint.saved_run import read_recipe
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.models import kinds_with
from gmlp_scale.models.toeplitz import toeplitz
from gmlp_scale.plan.describe import count_parameters


def spatial_matrices(trained: TrainedModel) -> list[np.ndarray]:
    """W_NN of every block's spatial projection, float32. TrainedModelError if the model has none."""
    if not trained.config.has_spatial_filters:
        kinds = kinds_with("has_spatial_filters")
        raise TrainedModelError(f"{trained.place} has no spatial projections: give a model of kind {kinds}")
    weights = [trained.weights[f"blocks.{number}.gating.weight"] for number in range(trained.config.num_blocks)]
    return [(toeplitz(weight) if weight.ndim == 1 else weight).numpy() for weight in weights]


def filters_of(trained: TrainedModel) -> list[np.ndarray]:
    """The spatial filter_N of every block, the middle row of W. TrainedModelError if the model has none."""
    return [matrix_NN[len(matrix_NN) // 2] for matrix_NN in spatial_matrices(trained)]


@torch.no_grad()
def attention_maps(trained: TrainedModel, ids: Sequence[int]) -> list[np.ndarray]:
    """softmax_NN of every block's tiny attention on one row: a position's attention to all positions sums to 1.

    A finetuned model's row is padded as in its finetuning, so N may be more than the number of ids.

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
    x_1ND = model.embedding(torch.tensor([[*ids, *[PAD_ID] * (num_positions - len(ids))]]))
    maps = []
    for block in model.blocks:
        maps.append(block.attention_weights(x_1ND)[0, 0].numpy())
        x_1ND = block(x_1ND)
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
        perplexities = curve(read_lines(f"{run_folder}/metrics.jsonl"), "eval/perplexity")
        if not perplexities:
            problems.append(f"{run_folder} has no held-out evaluation in metrics.jsonl: train it further")
        elif not math.isfinite(perplexities[-1][1]):
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
