"""Writes text with a model of next characters, one character after the other.

Shape suffixes: B batch (1), N positions, V vocabulary.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from gmlp_scale.checkpoint.saved_run import read_recipe, read_weights
from gmlp_scale.checkpoint.trained import copy_weights
from gmlp_scale.models.next_token import NextTokenBatch, NextTokenModel
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.tasks.characters import CharactersConfig

_LEAST_TEMPERATURE = 1e-3
"""Divided by a much smaller number, logits are infinite, and their softmax is NaN."""


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
