"""launch/plot_model.py: the numbers against definitions written out, and each picture of small real runs."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmlp_scale.analysis.pictures import (
    attention_maps,
    first_half_maximum,
    fit_power_law,
    run_sizes,
    sentence_pair,
    spatial_matrices,
)
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import TrainedModelError, read_export
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.export.folder import export_checkpoint, write_export
from gmlp_scale.models import build_model
from gmlp_scale.models.task_heads import SequenceClassifier
from gmlp_scale.train.filters import middle_row
from launch.plot_model import main
from tests.analysis.conftest import SEQUENCE_LENGTH

NUM_BLOCKS = 2
TEXTS = ["--text-a", "abcde $fgh$", "--text-b", "klmno"]
PICTURES = [
    ("gmlp", ["filters"]),
    ("gmlp", ["matrices", "--blocks", "1", "0"]),
    ("amlp", ["attention", *TEXTS]),
    ("amlp", ["attention", *TEXTS, "--blocks", "1"]),
]


def test_filters_are_the_middle_rows_of_toeplitz_matrices(runs):
    trained = read_run(runs / "gmlp")
    matrices = spatial_matrices(trained)
    filters = [middle_row(matrix_NN) for matrix_NN in matrices]
    n = SEQUENCE_LENGTH
    assert len(matrices) == len(filters) == NUM_BLOCKS
    for block, matrix_NN, filter_N in zip(trained.build().blocks, matrices, filters, strict=True):
        offsets = block.gating.weight.detach().numpy()
        assert matrix_NN.tolist() == [[offsets[n - 1 + j - i] for j in range(n)] for i in range(n)]
        assert filter_N.tolist() == [offsets[n - 1 + j - n // 2] for j in range(n)]
        assert filter_N.std() > 0


@torch.no_grad()
def test_attention_is_what_the_model_s_own_attention_multiplies_its_values_by(runs):
    trained = read_run(runs / "amlp")
    ids = [2, *range(10, 20), 3]
    maps = attention_maps(trained, ids)
    assert [map_NN.shape for map_NN in maps] == [(12, 12)] * NUM_BLOCKS
    inputs, model = {}, trained.build()
    for number, block in enumerate(model.blocks):
        block.attention.register_forward_hook(
            lambda attention, arguments, output, number=number: inputs.update({number: (arguments[0], output)})
        )
    model.encode(torch.tensor([ids]))
    for number, (block, map_NN) in enumerate(zip(model.blocks, maps, strict=True)):
        assert map_NN.sum(axis=1) == pytest.approx(np.ones(12), abs=1e-6) and map_NN.min() > 0
        y_1ND, attended_1NG = inputs[number]
        v_NK = block.attention.qkv(y_1ND)[0].chunk(3, dim=-1)[2]
        torch.testing.assert_close(block.attention.out(torch.from_numpy(map_NN) @ v_NK), attended_1NG[0])


def test_a_finetuned_model_s_row_is_padded(runs, tmp_path):
    pretrained = read_run(runs / "amlp")
    classifier = build_model(pretrained.recipe.model, head=lambda **trunk: SequenceClassifier(num_classes=2, **trunk))
    classifier.init_weights(torch.Generator().manual_seed(0))
    weights = {name: parameter.detach() for name, parameter in classifier.named_parameters()}
    given = {"details": {}, "row_length": 20, "head": "sequence_classification", "labels": ("a", "b")}
    write_export(replace(pretrained, weights=weights, **given), tmp_path / "hf")
    trained = read_export(tmp_path / "hf")
    padded, short = attention_maps(trained, [2, 10, 3]), attention_maps(trained, [2, 10, 3] + [0] * 17)
    assert [map_NN.shape for map_NN in padded] == [(20, 20)] * NUM_BLOCKS
    assert all(np.array_equal(a, b) for a, b in zip(padded, short, strict=True))
    with pytest.raises(TrainedModelError, match=r"the texts make 21 tokens; .* takes at most 20"):
        attention_maps(trained, range(21))


def test_the_first_half_s_maximum():
    maps = [np.full((2, 2), value) for value in (0.2, 0.5, 0.4, 0.9, 1.0)]
    maps[2][0, 1] = 0.7
    assert first_half_maximum(maps).tolist() == [[0.5, 0.7], [0.5, 0.5]]


def test_a_sentence_pair_is_laid_out_as_in_finetuning(runs):
    trained = read_run(runs / "amlp")
    tokenizer = Tokenizer(runs / "shards" / "tokenizer")
    ids, tokens = sentence_pair(trained, "abcde fghij", "klmno")
    assert ids == [2, *tokenizer.encode("abcde fghij"), 3, *tokenizer.encode("klmno"), 3]
    assert tokens[0] == "<cls>" and tokens[-1] == "<sep>" and len(tokens) == len(ids)
    assert "".join(tokens) == "<cls>abcdefghij<sep>klmno<sep>"


def test_models_without_what_is_asked_for_are_refused(runs):
    with pytest.raises(TrainedModelError, match="has no spatial projections: give a model of kind gmlp or amlp"):
        spatial_matrices(read_run(runs / "transformer"))
    with pytest.raises(TrainedModelError, match="has no tiny attention: give an aMLP"):
        attention_maps(read_run(runs / "gmlp"), [2, 3])
    with pytest.raises(TrainedModelError, match=f"the texts make 33 tokens; .* takes at most {SEQUENCE_LENGTH}"):
        attention_maps(read_run(runs / "amlp"), range(33))


def test_a_power_law_is_found_again_by_least_squares_of_the_logarithms():
    x = np.array([6.0e6, 1.3e8, 3.65e8, 9.41e8])
    law = fit_power_law(x, 57.0 * x**-0.1375)
    assert (law.exponent, law.coefficient) == pytest.approx((-0.1375, 57.0), rel=1e-6)
    assert law.at(x) == pytest.approx(57.0 * x**-0.1375)
    x, y = [1.0, 10.0, 100.0], [8.0, 5.0, 2.5]
    law = fit_power_law(x, y)
    assert (law.exponent, math.log(law.coefficient)) == pytest.approx(np.polyfit(np.log(x), np.log(y), 1))
    with pytest.raises(TrainedModelError, match="two runs of different sizes"):
        fit_power_law([5, 5], [1.0, 2.0])


def test_runs_have_their_parameters_and_last_perplexity(runs, tmp_path):
    (size,) = run_sizes([runs / "gmlp"])
    assert size.name == "gmlp" and size.step == 4
    assert size.num_parameters == sum(p.numel() for p in read_run(runs / "gmlp").build().parameters())
    logged = [json.loads(line) for line in (runs / "gmlp" / "metrics.jsonl").read_text().splitlines()]
    assert size.perplexity == [row["eval/perplexity"] for row in logged if "eval/perplexity" in row][-1]
    for name, lines in (("new", ""), ("diverged", '{"step": 2, "eval/perplexity": Infinity}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text((runs / "gmlp" / "config.yaml").read_text())
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    with pytest.raises(
        TrainedModelError, match=r"new has no held-out evaluation .*; .*diverged has the perplexity inf"
    ):
        run_sizes([tmp_path / "new", runs / "gmlp", tmp_path / "diverged"])


def assert_is_a_picture(path: Path) -> None:
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 100 and pixels.std() > 0.01


def images(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


@pytest.mark.parametrize(("kind", "words"), PICTURES, ids=["filters", "matrices", "attention", "attention-blocks"])
def test_a_run_s_picture(runs, launched, tmp_path, kind, words):
    run_dir = Path(shutil.copytree(runs / kind, tmp_path / kind))
    path = tmp_path / "pictures" / "a.png"
    code, printed, error = launched(main, *words, "--run", run_dir, "--step", 2, "--output", path)
    assert (code, printed) == (0, f"{path}\n"), error
    assert_is_a_picture(path)
    assert images(run_dir / "tensorboard" / "pictures") == {words[0]: [2]}


def test_an_export_s_picture_is_its_run_s(runs, tmp_path, succeeds):
    run_dir = Path(shutil.copytree(runs / "gmlp", tmp_path / "gmlp"))
    export_checkpoint(read_run(run_dir, 4), run_dir, tmp_path / "hf")
    for place, name in ((["--run", run_dir], "run.png"), (["--export", tmp_path / "hf"], "export.png")):
        options = ["filters", *place, "--output", tmp_path / name, "--tensorboard", tmp_path / "board"]
        succeeds(main, *options)
    of_run, of_export = (matplotlib.image.imread(tmp_path / name) for name in ("run.png", "export.png"))
    assert (of_run == of_export).all()
    assert images(tmp_path / "board") == {"filters": [4, 4]}


def test_scaling(runs, tmp_path, succeeds):
    options = ["scaling", "--runs", runs / "gmlp", runs / "amlp", runs / "transformer", "--output", tmp_path / "a.png"]
    printed = succeeds(main, *options, "--tensorboard", tmp_path / "board")
    assert_is_a_picture(tmp_path / "a.png")
    assert images(tmp_path / "board") == {"scaling": [0]}
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["gmlp", "amlp", "transformer"]
    assert lines[3].startswith("perplexity = ") and "x parameters ^ " in lines[3]


def test_mistakes_are_one_message_and_leave_with_2(runs, tmp_path, refuses):
    output = ["--output", tmp_path / "a.png"]
    for options, message in (
        (["filters", "--run", runs / "transformer"], "has no spatial projections"),
        (["matrices", "--run", runs / "gmlp", "--blocks", 0, 2, -1], "no block 2, -1; there are 0 to 1"),
        (["attention", "--run", runs / "gmlp", *TEXTS], "has no tiny attention"),
        (["attention", "--run", runs / "amlp", "--text-a", "x " * 40, "--text-b", "y"], "takes at most 32"),
        (["scaling", "--runs", runs / "gmlp"], "needs two runs of different sizes"),
        (["scaling", "--runs", runs / "gmlp", tmp_path], "no run at"),
        (["filters", "--run", tmp_path], "no run at"),
        (["filters", "--export", tmp_path], "no export at"),
        (["filters", "--export", tmp_path, "--step", 2], "--step needs --run"),
    ):
        refuses(message, main, *options, *output)
    assert not (tmp_path / "a.png").exists()
