"""Export folders and launch/export.py on a real run: written whole or not at all, and read back to the bit."""

import json
import math
import os
import resource

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.trained import ExportError, read_export
from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.export import folder as folder_module
from launch.export import main
from tests.models.every_kind import KINDS, TINY

HEADS = [
    ("masked_language_model", ()), ("sequence_classification", ("no", "maybe", "yes")), ("question_answering", ()),
    ("token_classification", ("O", "B-LOC", "I-LOC")),
]  # fmt: skip


def assert_weights_are(export, model):
    expected = dict(model.named_parameters())
    assert export.weights.keys() == expected.keys()
    for name, weight in export.weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back(tiny_export, tokenizer_folder, tmp_path, kind):
    model = tiny_export(kind, tmp_path / "hf")
    export = read_export(tmp_path / "hf")
    assert export.config.model_dump() | TINY | KINDS[kind] | {"vocab_size": 420} == export.config.model_dump()
    assert_weights_are(export, model)
    assert export.tokenizer_sha256 == Tokenizer(tokenizer_folder).sha256
    assert (export.head, export.labels, export.row_length) == ("masked_language_model", (), None)
    assert export.details == {"step": 3, "heldout": {"step": 2, "perplexity": 17.25}, "config": {"name": kind}}


@pytest.mark.parametrize(("head", "labels"), HEADS)
def test_every_head_comes_back(tiny_export, tmp_path, head, labels):
    model = tiny_export("gmlp", tmp_path / "hf", head, labels, row_length=8)
    export = read_export(tmp_path / "hf")
    assert_weights_are(export, model)
    assert (export.head, export.labels, export.row_length) == (head, labels, 8)


def test_every_file_has_the_mode_of_the_umask(tiny_export, tmp_path):
    before = os.umask(0o027)
    try:
        tiny_export("gmlp", tmp_path / "hf")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").rglob("*") if path.is_file()} == {0o640}


def test_the_file_holds_the_tied_matrix_once(export):
    names = load_file(export / "model.safetensors").keys()
    assert "model.embedding.weight" in names
    assert not any("head" in name for name in names)


def test_the_card_shows_the_recipe_the_steps_and_the_perplexity(export, tiny_export, tmp_path):
    card = (export / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nlicense: unknown\npipeline_tag: fill-mask\n")
    for text in (
        "aMLP, 2 blocks", "3 steps", "not measured at this step; 17.250 at step 2", "name: amlp",
        'pipeline("fill-mask"', "Padding counts for nothing (`masks_padding`)",
    ):  # fmt: skip
        assert text in card
    assert "model-index" not in card  # the figure is of other weights
    tiny_export("gmlp", tmp_path / "older", masks_padding=False)
    assert "it pads every row to 12 tokens itself" in (tmp_path / "older" / "README.md").read_text()


def test_the_card_of_finetuned_weights_shows_their_scores(tiny_export, tmp_path):
    scores = {"dev": {"accuracy": 0.75, "loss": 0.5}, "dev_mismatched": {"accuracy": 0.5, "loss": 0.25}}
    details = {"finetuned": {"task": "mnli", "step": 12, "scores": scores, "config": {}}, "pretrained": None}
    tiny_export("gmlp", tmp_path / "hf", "sequence_classification", ("a", "b"), details=details, row_length=8)
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    found = [(of.dataset_name, of.dataset_split, of.metric_type, of.metric_value) for of in card.data.eval_results]
    assert found == [("mnli", "dev", "accuracy", 0.75), ("mnli", "dev_mismatched", "accuracy", 0.5)]
    for text in (
        "Finetuned on mnli for 12 steps", "| dev_mismatched loss | 0.2500 |", 'pipeline("text-classification"',
        "Rows in training had 8",
    ):  # fmt: skip
        assert text in card.text


def test_figures_that_are_not_finite_are_null_and_in_no_index(tiny_export, tmp_path):
    heldout = {"step": 3, "loss": math.nan, "perplexity": math.inf, "accuracy": 0.5, "num_rows": 4}
    details = {"step": 3, "heldout": heldout, "config": {"data": {"shards": "x"}}}
    tiny_export("gmlp", tmp_path / "hf", details=details)

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    content = json.loads((tmp_path / "hf" / "config.json").read_text(), parse_constant=refuse)
    assert content["details"]["heldout"] == heldout | {"loss": None, "perplexity": None}
    assert read_export(tmp_path / "hf").details == content["details"]
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert "held-out perplexity inf" in card.text
    assert [result.metric_type for result in card.data.eval_results] == ["accuracy"]


def test_details_keep_no_place_of_this_machine(tiny_export, tmp_path):
    config = {
        "output_dir": "/home/ann/runs",
        "data": {"shards": "/home/ann/c4_512/", "cache_dir": "/scratch", "parts": [{"shards": "file:///home/ann/web"}]},
        "engine": {"deepspeed_config": "ds.json"},
        "init_from": "../ann/hf",
        "model": "s3://bucket/hf",
        "name": "gmlp",
    }
    tiny_export("gmlp", tmp_path / "hf", details={"config": config})
    assert read_export(tmp_path / "hf").details["config"] == {
        "data": {"shards": "c4_512", "parts": [{"shards": "web"}]},
        "engine": {},
        "init_from": "hf",
        "model": "s3://bucket/hf",
        "name": "gmlp",
    }
    files = [path.read_bytes() for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert not any(
        place in content for content in files for place in (b"/home/ann", b"../ann", b"/scratch", bytes(tmp_path))
    )


def test_a_taken_folder_is_refused_and_left_alone(tiny_export, tmp_path):
    (tmp_path / "empty").mkdir()
    tiny_export("gmlp", tmp_path / "empty")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="taken is there already: remove it"):
        tiny_export("gmlp", tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.txt"]
    with pytest.raises(ExportError, match=r"thesis\.txt is there already"):
        tiny_export("gmlp", tmp_path / "taken" / "thesis.txt")


def test_nothing_is_left_where_writing_fails(tiny_export, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(folder_module, "write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_export("gmlp", tmp_path / "exports" / "hf")
    assert list((tmp_path / "exports").iterdir()) == []


@pytest.mark.parametrize("num_bytes", [1_000, 20_000], ids=["text", "weights"])
def test_a_full_disk_is_an_error_that_names_the_folder(tiny_export, tmp_path, num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*exports/hf|exports/hf cannot be written.*File too large"):
            tiny_export("gmlp", tmp_path / "exports" / "hf", sequence_length=128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "exports").iterdir()) == []


def test_no_tokenizer(tiny_export, tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        tiny_export("gmlp", tmp_path / "hf", tokenizer_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "evaluated_step"), [(None, 4), (3, 2)])
def test_a_run_s_checkpoint_is_exported(run_dir, tmp_path, launched_export, step, evaluated_step):
    choice = [] if step is None else ["--step", step]
    code, printed, error = launched_export("--run", run_dir, "--output", tmp_path / "hf", *choice)
    assert (code, error) == (0, "")
    trained, written = read_run(run_dir, step), read_export(tmp_path / "hf")
    assert str(trained.place) in printed
    assert written.config == trained.config
    assert written.weights.keys() == trained.weights.keys()
    assert all(torch.equal(written.weights[name], weight) for name, weight in trained.weights.items())
    assert written.step == trained.step == (step or 4)
    assert written.details["heldout"]["step"] == evaluated_step
    assert written.details["data"] == trained.details["data"]
    assert written.details["config"]["train"]["num_steps"] == 4
    perplexity = f"{written.details['heldout']['perplexity']:.3f}"
    shown = f"perplexity {perplexity} (" if step is None else f"not measured at this step; {perplexity} at step 2 ("
    assert shown in (tmp_path / "hf" / "README.md").read_text()


def test_user_errors_are_one_message(run_dir, tmp_path, refuses):
    absent = f"{run_dir}/checkpoints has no checkpoint of step 7; it has those of 3, 4"
    for run, output, choice, message in (
        (tmp_path / "nowhere", tmp_path / "hf", [], f"no run at {tmp_path / 'nowhere'}: "),
        (run_dir, tmp_path / "hf", ["--step", 7], absent),
        (run_dir, run_dir, [], f"{run_dir} is there already"),
    ):
        refuses(message, main, "--run", run, "--output", output, *choice)
    assert not (tmp_path / "hf").exists()


def test_another_tokenizer_beside_the_shards_is_refused(run_dir, tmp_path, launched_export):
    place = run_dir.parent / "shards" / "tokenizer" / "tokenizer.model"
    own = place.read_bytes()
    train_tokenizer(["the cat and the dog went over the sea"] * 50, 275, place.parent)
    other = launched_export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own[:-100])
    damaged = launched_export("--run", run_dir, "--output", tmp_path / "hf")
    place.write_bytes(own)
    assert other[0] == damaged[0] == 2
    assert "is not the tokenizer that" in other[2]
    assert "tokenizer.model" in damaged[2]
