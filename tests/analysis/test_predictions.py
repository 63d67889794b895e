"""launch/fill_mask.py and launch/generate.py: the same text for a seed, and of what the model knows."""

import re

import pytest
import torch

from gmlp_scale.analysis.predictions import generate
from gmlp_scale.models import build_model
from gmlp_scale.models.task_heads import NextTokenBatch, NextTokenModel
from gmlp_scale.train.run import pretrain
from launch import generate as launcher
from launch.fill_mask import main
from tests.models.every_kind import perturb, tiny_config
from tests.tasks.test_characters import TEXT, recipe
from tests.written_shards import VOCAB_SIZE

ALPHABET = "abcde"


def test_every_mask_has_a_line_of_its_most_probable_tokens(runs, succeeds):
    printed = succeeds(main, "--run", runs / "gmlp", "--top", 2, "abcde <mask> fghij <mask>", "<mask>")
    lines = printed.splitlines()
    assert [line for line in lines if "%" not in line] == ["abcde <mask> fghij <mask>", "<mask>"]
    candidates = [line for line in lines if line.startswith("    ")]
    assert len(candidates) == 3 and all(line.count("%") == 2 for line in candidates)


def test_a_sentence_without_a_mask_is_refused(runs, launched):
    assert launched(main, "--run", runs / "gmlp", "abcde") == (2, "", "no <mask> in: abcde\n")


def test_candidates_are_as_many_as_the_vocabulary_has(runs, succeeds, refuses):
    printed = succeeds(main, "--run", runs / "gmlp", "--top", VOCAB_SIZE, "abcde <mask>")
    assert len(re.findall(r"['\"] \d+\.\d%", printed)) == VOCAB_SIZE
    for num, needed in ((0, "greater than or equal to 1"), (VOCAB_SIZE + 1, f"at most {VOCAB_SIZE}")):
        message = f"--top: found {num}; needed: {needed}"
        refuses(message, main, "--run", runs / "gmlp", "--top", num, "abcde <mask>")


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


def test_the_launcher_writes_from_a_run(succeeds, refuses, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    pretrain(recipe("gmlp", text, f"output_dir={tmp_path}"))
    run = ["--run", tmp_path / "gmlp", "--prompt", "boats"]
    output = succeeds(launcher.main, *run, "--length", 7)
    assert output.startswith("boats") and len(output) == len("boats") + 7 + 1
    refuses("needed: one or more of the model's characters", launcher.main, *run, "--prompt", "boß")
    for value in ("nan", "1e-42", "inf", "-1"):
        refuses("needed: 0, or finite and from 0.001 on", launcher.main, *run, "--temperature", value)
    refuses("no run at", launcher.main, "--run", tmp_path / "nothing")
