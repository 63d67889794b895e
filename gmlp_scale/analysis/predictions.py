"""What language models predict: the tokens at each <mask> of a sentence, and the characters that follow a prompt.

Shape suffixes: B batch (1), M masks, N positions, V vocabulary.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gmlp_scale.checkpoint.saved_run import read_recipe, read_weights
from gmlp_scale.checkpoint.trained import copy_weights
from gmlp_scale.data.batch import CLS_ID, MASK_ID, PAD_ID, SEP_ID, MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.task_heads import NextTokenBatch, NextTokenModel
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.tasks.characters import CharactersConfig

MASK = "<mask>"
_LEAST_TEMPERATURE = 1e-3
"""Divided by a much smaller number, logits are infinite, and their softmax is NaN."""


@torch.inference_mode()
def fill(model: Backbone, tokenizer: Tokenizer, sentence: str) -> Tensor:
    """probabilities_MV: of each token at each <mask> of the sentence, as the export's fill-mask pipeline gives them.

    A word's token begins with the space before the word, so a mask takes the place of that space too. A model that
    reads padding gets a row as long as in training.
    """
    first, *others = [tokenizer.encode(part) for part in sentence.replace(f" {MASK}", MASK).split(MASK)]
    ids = [CLS_ID, *first]
    for part in others:
        ids += [MASK_ID, *part]
    ids.append(SEP_ID)
    if not model.masks_padding:
        ids += [PAD_ID] * (model.sequence_length - len(ids))
    ids_1N = torch.tensor([ids])
    positions_1M = (ids_1N == MASK_ID).nonzero()[:, 1].unsqueeze(0)
    logits_1MV = model.predict(MaskedBatch(ids_1N, positions_1M, torch.zeros_like(positions_1M)))
    return logits_1MV[0].softmax(-1)


def describe(probabilities_MV: Tensor, tokenizer: Tokenizer, num_candidates: int) -> str:
    """A line for each <mask>: its most probable tokens, with their probabilities."""
    lines = []
    for probabilities, ids in zip(*(top.tolist() for top in probabilities_MV.topk(num_candidates)), strict=True):
        words = (f"{tokenizer.decode([id])!r} {p:.1%}" for p, id in zip(probabilities, ids, strict=True))
        lines.append("    " + "   ".join(words))
    return "\n".join(lines)


def read_model(run_folder: str | Path, step: int | None = None) -> tuple[NextTokenModel, str]:
    """The model of a run with `task: characters`, and its alphabet.

    Raises:
        TrainedModelError, CheckpointError, ConfigError: there is no such run or checkpoint, or it is of another task.
    """
    config = read_recipe(run_folder, CharactersConfig)
    checkpoint, weights = read_weights(run_folder, step)
    model = config.build_model()
    copy_weights(model, weights)
    return model.eval(), checkpoint.details["data"]["alphabet"]


def generate(
    model: NextTokenModel, alphabet: str, prompt: str, *, num_characters: int, temperature: float, seed: int
) -> Iterator[str]:
    """The characters that follow `prompt`, drawn from the model's distribution at `temperature`; 0 takes the likeliest.

    The model sees the last sequence_length characters.

    Raises:
        ConfigError: at once; the prompt is empty or has a character that the alphabet lacks, or the temperature is out
            of range.
    """
    unknown = sorted(set(prompt) - set(alphabet))
    if unknown or not prompt:
        found = f"found {''.join(unknown)!r}" if unknown else "found nothing"
        raise ConfigError("--prompt", [f"{found}; needed: one or more of the model's characters, {alphabet!r}"])
    if temperature and not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise ConfigError(
            "--temperature", [f"found {temperature}; needed: 0, or finite and from {_LEAST_TEMPERATURE} on"]
        )
    return _characters(model, alphabet, prompt, num_characters, temperature, seed)


@torch.no_grad()
def _characters(
    model: NextTokenModel, alphabet: str, prompt: str, num_characters: int, temperature: float, seed: int
) -> Iterator[str]:
    generator = torch.Generator().manual_seed(seed)
    ids = [alphabet.index(character) for character in prompt]
    for _ in range(num_characters):
        ids_BN = torch.tensor([ids[-model.sequence_length :]])
        logits_V = model.predict(NextTokenBatch(ids_BN, ids_BN))[0, -1]
        if temperature:
            ids.append(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator).item())
        else:
            ids.append(logits_V.argmax().item())
        yield alphabet[ids[-1]]
