"""The numbers behind the pictures: spatial filters and matrices, tiny attention, perplexity against parameters.

Shape suffixes: N positions, D width, K head width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gmlp_scale.checkpoint.saved_run import read_recipe
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.data.batch import CLS_ID, PAD_ID, SEP_ID
from gmlp_scale.export.image_models import TrainedClassifier
from gmlp_scale.models.gmlp import GmlpBlock, GmlpConfig
from gmlp_scale.models.toeplitz import toeplitz
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.train.filters import spatial_filters
from gmlp_scale.train.log_files import read_metrics


@torch.no_grad()
def spatial_matrices(trained: TrainedModel) -> list[np.ndarray]:
    """W_NN of every block's spatial projection, float32. TrainedModelError if the model has none."""
    model = trained.build()
    if not all(isinstance(block, GmlpBlock) for block in model.blocks):
        raise _no_spatial_projections(trained)
    return [block.gating.spatial_weights(model.sequence_length)[0].numpy() for block in model.blocks]


def image_matrices(trained: TrainedClassifier) -> list[np.ndarray]:
    """W_NN of every block of an image classifier, float32. TrainedModelError if it has none."""
    if not isinstance(trained.model, GmlpConfig):
        raise TrainedModelError(f"{trained.name} has no spatial projections: give a gMLP or an aMLP")
    weights = [trained.weights[f"blocks.{number}.gating.weight"] for number in range(trained.model.num_blocks)]
    return [(toeplitz(weight) if weight.ndim == 1 else weight).numpy() for weight in weights]


def filters_of(trained: TrainedModel) -> list[np.ndarray]:
    """The spatial filter_N of every block. TrainedModelError if the model has none."""
    filters = spatial_filters(trained.weights.items())
    if not filters:
        raise _no_spatial_projections(trained)
    return filters


def _no_spatial_projections(trained: TrainedModel) -> TrainedModelError:
    return TrainedModelError(f"{trained.place} has no spatial projections: give a gMLP or an aMLP")


@torch.no_grad()
def attention_maps(trained: TrainedModel, ids: Sequence[int]) -> list[np.ndarray]:
    """softmax_NN of every block's tiny attention on one row: a position's attention to all positions sums to 1.

    A finetuned model's row is padded as in its finetuning, so N may be more than the number of ids.

    Raises:
        TrainedModelError: the model has no tiny attention, or the row is too long for it.
    """
    model, num_positions = trained.build(), trained.row_length or len(ids)
    if not all(isinstance(block, GmlpBlock) and block.attention is not None for block in model.blocks):
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
        try:
            lines = [line for line in read_metrics(f"{run_folder}/metrics.jsonl") if "eval/perplexity" in line]
        except FileNotFoundError:
            lines = []
        last = lines[-1] if lines else {}
        perplexity = last.get("eval/perplexity")
        if perplexity is None:
            problems.append(f"{run_folder} has no held-out evaluation in metrics.jsonl: train it further")
        elif not math.isfinite(perplexity):
            problems.append(f"{run_folder} has the perplexity {perplexity}: leave it out")
        else:
            sizes.append(RunSize(recipe.name, count_parameters(recipe), last["step"], perplexity))
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
    log_x, log_y = np.log(x), np.log(y)
    from_mean = log_x - log_x.mean()
    exponent = from_mean @ log_y / (from_mean @ from_mean)
    return PowerLaw(float(np.exp(log_y.mean() - exponent * log_x.mean())), float(exponent))


def scaling_law(sizes: Sequence[RunSize]) -> PowerLaw:
    """Perplexity over parameters (the paper's Figure 8). TrainedModelError if all runs are of one size."""
    return fit_power_law([size.num_parameters for size in sizes], [size.perplexity for size in sizes])


def scaling_table(sizes: Sequence[RunSize], law: PowerLaw) -> str:
    lines = []
    for size in sizes:
        parameters = f"{size.num_parameters:,} parameters"
        lines.append(f"{size.name:24} {parameters:>26}  perplexity {size.perplexity:10.3f} at step {size.step:,}")
    lines.append(f"perplexity = {law.coefficient:.4g} x parameters ^ {law.exponent:.4f}")
    return "\n".join(lines)
