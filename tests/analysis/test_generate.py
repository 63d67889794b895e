"""Text that a model writes: the same for a seed, of characters that it knows, and from the newest checkpoint."""

import pytest
import torch

from gmlp_scale.analysis.generate import generate
from gmlp_scale.models import build_model
from gmlp_scale.models.next_token import NextTokenBatch, NextTokenModel
from gmlp_scale.train.run import pretrain
from launch import generate as launcher
from tests.models.every_kind import perturb, tiny_config
from tests.tasks.test_characters import TEXT, recipe

ALPHABET = "abcde"


@pytest.fixture
def model() -> NextTokenModel:
    model = build_model(tiny_config("gmlp", vocab_size=5), head=NextTokenModel, causal=True)
    model.init_weights(torch.Generator().manual_seed(0))
    perturb(model)
    return model.eval()


def test_the_likeliest_character_follows_at_temperature_0(model):
    written = "".join(generate(model, ALPHABET, "abba", num_characters=20, temperature=0, seed=0))
    text = "abba" + written
    for end in (4, 9, 23):  # the last one is further than the model looks back
        ids_BN = torch.tensor([[ALPHABET.index(character) for character in text[max(0, end - 12) : end]]])
        likeliest = model.predict(NextTokenBatch(ids_BN, ids_BN))[0, -1].argmax().item()
        assert text[end] == ALPHABET[likeliest]


def test_a_seed_repeats_and_temperature_spreads(model):
    def written(seed: int, temperature: float) -> str:
        return "".join(generate(model, ALPHABET, "a", num_characters=60, temperature=temperature, seed=seed))

    assert written(1, 1.0) == written(1, 1.0) != written(2, 1.0)
    assert set(written(3, 100.0)) == set(ALPHABET)


def test_the_launcher_writes_from_a_run(launched, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    pretrain(recipe("gmlp", text, f"output_dir={tmp_path}"))
    run = ["--run", tmp_path / "gmlp", "--prompt", "boats"]
    code, output, _ = launched(launcher.main, *run, "--length", 7)
    assert code == 0 and output.startswith("boats") and len(output) == len("boats") + 7 + 1
    for arguments, needed in (
        (["--prompt", "boß"], "needed: one or more of the model's characters"),
        *(
            (["--temperature", value], "needed: 0, or finite and from 0.001 on")
            for value in ("nan", "1e-42", "inf", "-1")
        ),
    ):
        code, output, error = launched(launcher.main, *run, *arguments)
        assert code == 2 and needed in error and not output
    code, _, error = launched(launcher.main, "--run", tmp_path / "nothing")
    assert code == 2 and "no run at" in error
