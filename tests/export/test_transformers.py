"""Exports in a process of their own, where neither this package nor pydantic nor sentencepiece can be imported."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gmlp_scale.analysis.predictions import fill
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.task_heads import LabelledBatch, SpanBatch
from gmlp_scale.tasks.question_answering import Question, QuestionRows
from tests.models.every_kind import KINDS, TINY

LENGTH = TINY["sequence_length"]
IDS = torch.randint(5, 420, (3, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = ("no", "maybe", "yes")
ROW_LENGTH, STRIDE = 10, 3
LOADER = Path(__file__).with_name("load_exports.py")
QUESTIONS = [
    {"question": "a dog", "context": "the cat went over to see what 日本 had done with their old ship at sea" * repeats}
    for repeats in (1, 5)
]


@pytest.fixture(scope="module")
def models(tiny_export, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    models = {kind: tiny_export(kind, folder / kind) for kind in KINDS}
    finetuned = {"row_length": ROW_LENGTH, "details": {"task": "a task"}}
    models["classifier"] = tiny_export("amlp", folder / "classifier", "sequence_classification", LABELS, **finetuned)
    models["regressor"] = tiny_export(
        "amlp", folder / "regressor", "sequence_classification", ("similarity",), **finetuned
    )
    for name, masks_padding in (("spans", True), ("older spans", False)):
        of_spans = {"document_stride": STRIDE, "masks_padding": masks_padding, **finetuned}
        models[name] = tiny_export("amlp", folder / name, "question_answering", **of_spans)
    return folder, models


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory):
    """(facts, tensors) of the other process."""
    folder, _ = models
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    process = subprocess.run(
        [sys.executable, "-I", LOADER, folder, *map(json.dumps, (IDS.tolist(), list(KINDS), QUESTIONS))],
        cwd=elsewhere,
        env={"HF_HOME": str(elsewhere), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(elsewhere)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), load_file(folder / "tensors.safetensors")


@pytest.fixture(scope="module")
def facts(loaded) -> dict:
    return loaded[0]


@pytest.fixture(scope="module")
def tensors(loaded) -> dict[str, torch.Tensor]:
    return loaded[1]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def every_logit(model, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model.predict(MaskedBatch(ids, positions, ids))


def test_transformers_do_not_see_padding(models, tensors):
    assert_close(tensors["padded"], every_logit(models[1]["bert-relative"], IDS[:, :7]))


def test_the_package_is_not_needed(facts):
    assert facts["imported"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_ours(models, tensors, kind):
    model = models[1][kind]
    assert_close(tensors[f"{kind} whole"], every_logit(model, IDS))
    short = IDS[:, :7] if model.masks_padding else torch.nn.functional.pad(IDS[:, :7], (0, LENGTH - 7))
    assert_close(tensors[f"{kind} short"], every_logit(model, short)[:, :7])
    assert tensors[f"{kind} whole"].std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_not_change_its_rows(tensors, kind):
    for outcome in ("batch", "mask"):
        assert_close(tensors[f"{kind} {outcome}"], tensors[f"{kind} alone"])


def test_collators_pad_and_mask(facts, tokenizer_folder):
    texts = [[2, *Tokenizer(tokenizer_folder).encode(text), 3] for text in ("the cat", "a dog went over")]
    length = max(map(len, texts))
    ids = [text + [0] * (length - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (length - len(text)) for text in texts]
    assert facts["collated"]["padding"] == {"input_ids": ids, "attention_mask": mask, "labels": [1, 1]}
    tags = [[1] * len(text) + [-100] * (length - len(text)) for text in texts]
    assert facts["collated"]["tags"] == {"input_ids": ids, "attention_mask": mask, "labels": tags}
    masked = {name: np.array(values) for name, values in facts["collated"]["masking"].items()}
    chosen, ids, mask = masked["labels"] != -100, np.array(ids), np.array(mask)
    assert np.array_equal(masked["attention_mask"], mask)
    assert chosen.any() and (ids[chosen] > 4).all()  # neither special tokens nor padding
    assert np.array_equal(np.where(chosen, masked["labels"], masked["input_ids"]), ids)
    assert all(math.isfinite(loss) for loss in facts["losses"])


@pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="Trainer needs accelerate")
def test_trainer_trains_in_batches(facts):
    before, after = facts["losses of Trainer"]
    assert after < before / 2


def test_pipelines_give_the_same_in_batches(facts):
    filled, alone = facts["filled in a batch"]
    for candidates, others in zip(filled, alone, strict=True):
        assert [c["token"] for c in candidates] == [c["token"] for c in others]
        assert [c["score"] for c in candidates] == pytest.approx([c["score"] for c in others], abs=1e-5)
    classified, alone = facts["classified in a batch"]
    assert [c["label"] for c in classified] == [c["label"] for c in alone]
    assert [c["score"] for c in classified] == pytest.approx([c["score"] for c in alone], abs=1e-5)
    for found, other in zip(facts["answers in a batch"], facts["answers"], strict=True):
        assert found == {**other, "score": pytest.approx(other["score"], abs=1e-5)}


@torch.no_grad()
def test_base_model_and_loss(models, facts, tensors):
    model = models[1]["amlp"]
    assert_close(tensors["hidden states"], model.norm(model.encode(IDS)))
    losses = -every_logit(model, IDS).log_softmax(-1).take_along_dim(IDS.unsqueeze(-1), dim=-1).squeeze(-1)
    assert facts["loss"] == pytest.approx(losses[IDS % 3 == 0].mean().item(), abs=1e-5)
    assert facts["hidden size"] == TINY["d_model"]


def test_too_long_rows_are_refused(facts):
    assert facts["too long"].startswith("the rows hold 24 tokens but the model was made for at most 12: cut the rows")


def test_round_trip_through_transformers(models, facts, tensors, tokenizer_folder):
    assert torch.equal(tensors["saved"], tensors["amlp whole"])
    tokenizer = Tokenizer(tokenizer_folder)
    assert facts["saved tokenizer"] == [2, *tokenizer.encode("the"), 4, *tokenizer.encode(" cat"), 3]


def test_a_model_saved_in_parts_is_read_back(models, tokenizer_folder):
    folder, ours = models
    assert len(list((folder / "in_parts").glob("model-*.safetensors"))) > 1
    export = read_export(folder / "in_parts")
    assert export.details["step"] == 3
    assert all(torch.equal(export.weights[name], weight) for name, weight in ours["amlp"].named_parameters())


def test_a_model_from_scratch_starts_as_ours(facts):
    assert facts["spatial bias"] == [1.0]
    assert 0 < facts["spatial weight"] < 0.01


def test_fill_mask_gives_our_probabilities(models, facts, tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder)
    before, after = tokenizer.encode("the"), tokenizer.encode(" dog")
    ids = [2, *before, 4, *after, 3]
    row = torch.tensor([ids + [0] * (LENGTH - len(ids))])
    logits = every_logit(models[1]["amlp"], row)[0, 1 + len(before)]
    expected = logits.softmax(-1).topk(5)
    assert [candidate["token"] for candidate in facts["filled"]] == expected.indices.tolist()
    assert [candidate["score"] for candidate in facts["filled"]] == pytest.approx(expected.values.tolist(), abs=1e-5)
    ours = fill(models[1]["amlp"], tokenizer, "the <mask> dog")[0].topk(5)  # launch/fill_mask.py
    assert ours.indices.tolist() == expected.indices.tolist()
    assert ours.values.tolist() == pytest.approx(expected.values.tolist(), abs=1e-6)
    best = tokenizer.decode([*before, facts["filled"][0]["token"], *after])
    assert facts["filled"][0]["sequence"] == best


def test_new_heads_on_a_pretrained_trunk(facts):
    assert facts["AutoModelForSequenceClassification"] == ["GmlpScaleForSequenceClassification", 0.1]
    assert facts["AutoModelForTokenClassification"] == ["GmlpScaleForTokenClassification", 0.1]
    assert facts["AutoModelForQuestionAnswering"] == ["GmlpScaleForQuestionAnswering", 0.1]


def test_hidden_states_and_attentions_are_there(facts):
    states, attentions = facts["shapes"]
    assert states == [[3, 7, TINY["d_model"]]] * 3
    assert attentions == [[3, 1, 7, 7]] * 2


def test_token_classification_tags_every_piece(facts, tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder)
    for text, tags in zip(("the cat", "a dog went over"), facts["tagged"], strict=True):
        assert [tag["index"] for tag in tags] == list(range(1, len(tokenizer.encode(text)) + 1))
        assert "".join(text[tag["start"] : tag["end"]] for tag in tags) == text


def pair_row(tokenizer_folder) -> torch.Tensor:
    """The pair of texts that load_exports.py gives, as finetuning pads it."""
    tokenizer = Tokenizer(tokenizer_folder)
    ids = [2, *tokenizer.encode("the cat"), 3, *tokenizer.encode("a dog"), 3]
    return torch.nn.functional.pad(torch.tensor([ids]), (0, max(0, ROW_LENGTH - len(ids))))


@torch.no_grad()
def test_finetuned_heads_give_the_logits_of_finetuning(models, tensors):
    padded = torch.nn.functional.pad(IDS[:, :7], (0, ROW_LENGTH - 7))
    assert_close(tensors["class logits"], models[1]["classifier"].predict(LabelledBatch(padded, None)))
    span_logits = models[1]["spans"].predict(SpanBatch(padded, None, None))[:, :7]
    assert_close(tensors["first logits"], span_logits[..., 0])
    assert_close(tensors["last logits"], span_logits[..., 1])


@torch.no_grad()
def test_regression_gives_its_number_and_the_squared_error(models, facts, tokenizer_folder):
    padded = torch.nn.functional.pad(IDS[:, :7], (0, ROW_LENGTH - 7))
    loss = models[1]["regressor"](LabelledBatch(padded, torch.tensor([0.0, 2.5, 5.0]))).item()
    assert facts["squared error"] == pytest.approx(loss, abs=1e-5)
    number = models[1]["regressor"].predict(LabelledBatch(pair_row(tokenizer_folder), None)).item()
    assert facts["measured"] == [{"label": "similarity", "score": pytest.approx(number, abs=1e-5)}]


@torch.no_grad()
def test_text_classification(models, facts, tokenizer_folder):
    probabilities = (
        models[1]["classifier"].predict(LabelledBatch(pair_row(tokenizer_folder), None))[0].softmax(-1).tolist()
    )
    found = {entry["label"]: entry["score"] for entry in facts["classified"]}
    assert found == pytest.approx(dict(zip(LABELS, probabilities, strict=True)), abs=1e-5)


@pytest.mark.parametrize(("name", "answers"), [("spans", "answers"), ("older spans", "answers of older spans")])
@torch.no_grad()
def test_question_answering_answers_as_finetuning_scores(models, facts, tokenizer_folder, name, answers):
    questions = [Question(str(number), **texts, answers=()) for number, texts in enumerate(QUESTIONS)]
    rows = QuestionRows(questions, Tokenizer(tokenizer_folder), ROW_LENGTH, STRIDE, has_unanswerable=True)
    summaries = rows.summarize(models[1][name].predict(rows.batch(np.arange(rows.num_rows))))
    texts, null_odds = rows.answers(summaries.numpy())
    for found, asked, text, odds in zip(facts[answers], QUESTIONS, texts.values(), null_odds.values(), strict=True):
        assert found["answer"] == text != ""
        assert asked["context"][found["start"] : found["end"]] == text
        assert found["score"] == pytest.approx(1 / (1 + math.exp(odds)), abs=1e-5)
    if name == "spans":
        assert facts["answers of other windows"] != facts["answers"]
        assert facts["answer or nothing"]["answer"] == ("" if null_odds["0"] > 0 else texts["0"])


def test_the_code_of_an_export_is_the_package_s_own(models):
    folder, _ = models
    package = Path(__file__).parents[2] / "gmlp_scale"
    for name in ("gmlp", "mixer", "transformer", "backbone", "layers"):
        ours, exported = ((place / f"{name}.py").read_text() for place in (package / "models", folder / "gmlp"))
        changed = [line for line in exported.splitlines() if line not in ours.splitlines()]
        assert all(line.startswith("from .") for line in changed)
