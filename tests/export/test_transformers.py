"""Exports in a process of their own, where neither this package nor pydantic nor sentencepiece can be imported."""

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gmlp_scale.analysis.fill_mask import fill
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.models.heads import LabelledBatch, SpanBatch
from gmlp_scale.tasks.question_answering import Question, QuestionRows
from gmlp_scale.trained import read_export
from tests.models.every_kind import KINDS, TINY

LENGTH = TINY["sequence_length"]
IDS = torch.randint(5, 420, (3, LENGTH), generator=torch.Generator().manual_seed(0))
LABELS = ("no", "maybe", "yes")
ROW_LENGTH, STRIDE = 10, 3
QUESTIONS = [
    {"question": "a dog", "context": "the cat went over to see what 日本 had done with their old ship at sea" * repeats}
    for repeats in (1, 5)
]

LOADER = """
import importlib.util, json, sys

ABSENT = ("gmlp_scale", "pydantic", "sentencepiece", "deepspeed")  # deepspeed needs pydantic
sys.modules.update(dict.fromkeys(ABSENT))  # to import one of them is a ModuleNotFoundError
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel, AutoModelForMaskedLM, AutoModelForQuestionAnswering, AutoModelForSequenceClassification, AutoTokenizer,
    DataCollatorForLanguageModeling, DataCollatorForTokenClassification, DataCollatorWithPadding, pipeline,
)
torch.set_num_threads(1)
folder, ids = sys.argv[1], torch.tensor(json.loads(sys.argv[2]))
tensors, facts = {}, {}

def load(auto, name, **settings):
    return auto.from_pretrained(f"{folder}/{name}", trust_remote_code=True, **settings)

with torch.no_grad():
    for kind in json.loads(sys.argv[3]):
        model = load(AutoModelForMaskedLM, kind)
        tensors[f"{kind} whole"] = model(ids).logits
        tensors[f"{kind} short"] = model(ids[:, :7]).logits
        mixed = ids[:, :9].where(torch.arange(9) < torch.tensor([[9], [7], [5]]), 0)
        tensors[f"{kind} batch"] = model(mixed).logits[2, :5]
        tensors[f"{kind} mask"] = model(ids[:, :9], attention_mask=(mixed != 0).long()).logits[2, :5]
        tensors[f"{kind} alone"] = model(ids[2:, :5]).logits[0]
    try:
        model(torch.cat([ids, ids], dim=1))
    except ValueError as error:
        facts["too long"] = str(error)

    model = load(AutoModelForMaskedLM, "amlp")
    tensors["hidden states"] = load(AutoModel, "amlp")(ids).last_hidden_state
    facts["hidden size"] = model.config.hidden_size
    facts["loss"] = model(ids, labels=ids.where(ids % 3 == 0, -100)).loss.item()
    model.save_pretrained(f"{folder}/saved")
    load(AutoTokenizer, "amlp").save_pretrained(f"{folder}/saved")
    padded = ids.where(torch.arange(ids.shape[1]) < 7, 0)
    tensors["padded"] = load(AutoModelForMaskedLM, "bert-relative")(padded).logits[:, :7]
    tensors["saved"] = load(AutoModelForMaskedLM, "saved")(ids).logits
    facts["saved tokenizer"] = load(AutoTokenizer, "saved")("the <mask> cat")["input_ids"]
    model.save_pretrained(f"{folder}/in_parts", max_shard_size="10KB")
    tensors["tuple"], = model(ids, return_dict=False)
    model.resize_token_embeddings(430, mean_resizing=False)
    facts["resized"] = model(ids).logits.shape[-1]
    scratch = AutoModelForMaskedLM.from_config(model.config, trust_remote_code=True)
    facts["spatial bias"] = scratch.model.blocks[0].gating.bias.unique().tolist()
    facts["spatial weight"] = scratch.model.blocks[0].gating.weight.abs().max().item()

    fill = pipeline("fill-mask", model=f"{folder}/amlp", trust_remote_code=True)
    facts["filled"] = fill("the <mask> dog")
    texts = ["the <mask> dog", "a <mask>", "the <mask> see"]
    facts["filled in a batch"] = [fill(texts, batch_size=3), [fill(text) for text in texts]]

    tokenizer = load(AutoTokenizer, "amlp")
    features = [tokenizer("the cat"), tokenizer("a dog went over")]
    padded = DataCollatorWithPadding(tokenizer)([feature | {"label": 1} for feature in map(dict, features)])
    torch.manual_seed(0)
    masked = DataCollatorForLanguageModeling(tokenizer)(features)
    tagged = [dict(feature) | {"labels": [1] * len(feature["input_ids"])} for feature in features]
    collated = {"padding": padded, "masking": masked, "tags": DataCollatorForTokenClassification(tokenizer)(tagged)}
    facts["collated"] = {name: {key: value.tolist() for key, value in c.items()} for name, c in collated.items()}
    facts["losses"] = [
        load(AutoModelForMaskedLM, "amlp")(**masked).loss.item(),
        load(AutoModelForSequenceClassification, "classifier")(**padded).loss.item(),
    ]

    for auto in (AutoModelForSequenceClassification, AutoModelForQuestionAnswering):
        model = load(auto, "amlp")  # a new head on the pretrained trunk
        facts[auto.__name__] = [type(model).__name__, model.model.dropout.p]
    tensors["class logits"] = load(AutoModelForSequenceClassification, "classifier")(ids[:, :7]).logits
    spans = load(AutoModelForQuestionAnswering, "spans")(ids[:, :7])
    tensors["first logits"], tensors["last logits"] = spans.start_logits, spans.end_logits
    mask = (torch.arange(9) < torch.tensor([[9], [7], [5]])).long()
    for head, name in [(AutoModel, "amlp"), (AutoModelForSequenceClassification, "classifier"),
                       (AutoModelForQuestionAnswering, "spans")]:
        model = load(head, name)
        for outcome, *given in [("batch", ids[:, :9], mask), ("alone", ids[2:, :5])]:
            logits = torch.stack(model(*given, return_dict=False), dim=1)
            tensors[f"{name} head {outcome}"] = logits[-1] if name == "classifier" else logits[-1, :, :5]
    try:
        model(ids)
    except ValueError as error:
        facts["too long for finetuning"] = str(error)
    classify = pipeline("text-classification", model=f"{folder}/classifier", trust_remote_code=True)
    facts["classified"] = classify({"text": "the cat", "text_pair": "a dog"}, top_k=None)
    texts = ["the cat", "a", "a dog see"]
    facts["classified in a batch"] = [classify(texts, batch_size=3), [classify(text)[0] for text in texts]]
    regressor = load(AutoModelForSequenceClassification, "regressor")
    facts["squared error"] = regressor(ids[:, :7], labels=torch.tensor([0.0, 2.5, 5.0])).loss.item()
    measure = pipeline("text-classification", model=f"{folder}/regressor", trust_remote_code=True)
    facts["measured"] = measure({"text": "the cat", "text_pair": "a dog"}, top_k=None)
    answer = pipeline("question-answering", model=f"{folder}/spans", trust_remote_code=True)
    facts["answers"] = answer(json.loads(sys.argv[4]))
    facts["answers in a batch"] = answer(json.loads(sys.argv[4]), batch_size=4)
    facts["answers of other windows"] = answer(json.loads(sys.argv[4]), document_stride=1)
    facts["answer or nothing"] = answer(**json.loads(sys.argv[4])[0], handle_impossible_answer=True)

facts["imported"] = [name for name in sys.modules if name.partition(".")[0] in ABSENT and sys.modules[name]]
if importlib.util.find_spec("accelerate"):
    from transformers import Trainer, TrainingArguments
    model = load(AutoModelForSequenceClassification, "classifier")
    rows = [dict(tokenizer(text)) | {"label": number % 3} for number, text in enumerate(["the cat", "a", "a dog"] * 8)]
    settings = TrainingArguments(f"{folder}/trainer", num_train_epochs=5, learning_rate=1e-2, report_to="none",
                                 use_cpu=True, save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    facts["losses of Trainer"] = [before, trainer.evaluate()["eval_loss"]]
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/tensors.safetensors")
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def models(tiny_export, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    models = {kind: tiny_export(kind, folder / kind) for kind in KINDS}
    finetuned = {"row_length": ROW_LENGTH, "details": {"task": "a task"}}
    models["classifier"] = tiny_export("amlp", folder / "classifier", "sequence_classification", LABELS, **finetuned)
    models["regressor"] = tiny_export(
        "amlp", folder / "regressor", "sequence_classification", ("similarity",), **finetuned
    )
    models["spans"] = tiny_export("amlp", folder / "spans", "question_answering", document_stride=STRIDE, **finetuned)
    return folder, models


@pytest.fixture(scope="module")
def loaded(models, tmp_path_factory):
    """(facts, tensors) of the other process."""
    folder, _ = models
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    process = subprocess.run(
        [sys.executable, "-I", "-c", LOADER, folder, *map(json.dumps, (IDS.tolist(), list(KINDS), QUESTIONS))],
        cwd=elsewhere,
        env={"HF_HOME": str(elsewhere), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(elsewhere)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1]), load_file(folder / "tensors.safetensors")


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def every_logit(model, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model.predict(MaskedBatch(ids, positions, ids))


def test_transformers_do_not_see_padding(models, loaded):
    assert_close(loaded[1]["padded"], every_logit(models[1]["bert-relative"], IDS[:, :7]))


def test_the_package_is_not_needed(loaded):
    facts, _ = loaded
    assert facts["imported"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_ours(models, loaded, kind):
    _, tensors = loaded
    model = models[1][kind]
    assert_close(tensors[f"{kind} whole"], every_logit(model, IDS))
    short = IDS[:, :7] if model.masks_padding else torch.nn.functional.pad(IDS[:, :7], (0, LENGTH - 7))
    assert_close(tensors[f"{kind} short"], every_logit(model, short)[:, :7])
    assert tensors[f"{kind} whole"].std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_does_not_change_its_rows(loaded, kind):
    _, tensors = loaded
    for outcome in ("batch", "mask"):
        assert_close(tensors[f"{kind} {outcome}"], tensors[f"{kind} alone"])


@pytest.mark.parametrize("name", ["amlp", "classifier", "spans"])
def test_a_batch_does_not_change_the_answers_of_any_head(loaded, name):
    assert_close(loaded[1][f"{name} head batch"], loaded[1][f"{name} head alone"])


def test_collators_pad_and_mask(loaded, tokenizer_folder):
    facts, _ = loaded
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
def test_trainer_trains_in_batches(loaded):
    before, after = loaded[0]["losses of Trainer"]
    assert after < before / 2


def test_pipelines_give_the_same_in_batches(loaded):
    facts, _ = loaded
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
def test_base_model_and_loss(models, loaded):
    facts, tensors = loaded
    model = models[1]["amlp"]
    assert_close(tensors["hidden states"], model.norm(model.encode(IDS)))
    losses = -every_logit(model, IDS).log_softmax(-1).take_along_dim(IDS.unsqueeze(-1), dim=-1).squeeze(-1)
    assert facts["loss"] == pytest.approx(losses[IDS % 3 == 0].mean().item(), abs=1e-5)
    assert facts["hidden size"] == TINY["d_model"]


def test_too_long_rows_are_refused(loaded):
    facts, _ = loaded
    assert facts["too long"].startswith("the rows hold 24 tokens but in training they held 12: cut the rows")
    assert facts["too long for finetuning"].endswith(
        "held 10: cut the rows, as the tokenizer does with truncation=True, max_length=10"
    )


def test_round_trip_through_transformers(models, loaded, tokenizer_folder):
    facts, tensors = loaded
    assert torch.equal(tensors["saved"], tensors["amlp whole"])
    tokenizer = Tokenizer(tokenizer_folder)
    assert facts["saved tokenizer"] == [2, *tokenizer.encode("the"), 4, *tokenizer.encode(" cat"), 3]
    assert facts["resized"] == 430


def test_a_model_saved_in_parts_is_read_back(models, loaded, tokenizer_folder):
    folder, ours = models
    assert len(list((folder / "in_parts").glob("model-*.safetensors"))) > 1
    shutil.copy(tokenizer_folder / "tokenizer.model", folder / "in_parts")
    export = read_export(folder / "in_parts")
    assert export.details["step"] == 3
    assert all(torch.equal(export.weights[name], weight) for name, weight in ours["amlp"].named_parameters())


def test_outputs_come_as_a_tuple_too(loaded):
    _, tensors = loaded
    assert torch.equal(tensors["tuple"], tensors["amlp whole"])


def test_a_model_from_scratch_starts_as_ours(loaded):
    facts, _ = loaded
    assert facts["spatial bias"] == [1.0]
    assert 0 < facts["spatial weight"] < 0.01


def test_fill_mask_gives_our_probabilities(models, loaded, tokenizer_folder):
    facts, _ = loaded
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


def test_new_heads_on_a_pretrained_trunk(loaded):
    facts, _ = loaded
    assert facts["AutoModelForSequenceClassification"] == ["GmlpScaleForSequenceClassification", 0.1]
    assert facts["AutoModelForQuestionAnswering"] == ["GmlpScaleForQuestionAnswering", 0.1]


@torch.no_grad()
def test_finetuned_heads_pad_as_in_finetuning(models, loaded):
    _, tensors = loaded
    padded = torch.nn.functional.pad(IDS[:, :7], (0, ROW_LENGTH - 7))
    assert_close(tensors["class logits"], models[1]["classifier"].predict(LabelledBatch(padded, None)))
    span_logits = models[1]["spans"].predict(SpanBatch(padded, None, None))[:, :7]
    assert_close(tensors["first logits"], span_logits[..., 0])
    assert_close(tensors["last logits"], span_logits[..., 1])


@torch.no_grad()
def test_regression_gives_its_number_and_the_squared_error(models, loaded, tokenizer_folder):
    facts, _ = loaded
    padded = torch.nn.functional.pad(IDS[:, :7], (0, ROW_LENGTH - 7))
    loss = models[1]["regressor"](LabelledBatch(padded, torch.tensor([0.0, 2.5, 5.0]))).item()
    assert facts["squared error"] == pytest.approx(loss, abs=1e-5)
    tokenizer = Tokenizer(tokenizer_folder)
    ids = [2, *tokenizer.encode("the cat"), 3, *tokenizer.encode("a dog"), 3]
    row = torch.nn.functional.pad(torch.tensor([ids]), (0, max(0, ROW_LENGTH - len(ids))))
    number = models[1]["regressor"].predict(LabelledBatch(row, None)).item()
    assert facts["measured"] == [{"label": "similarity", "score": pytest.approx(number, abs=1e-5)}]


@torch.no_grad()
def test_text_classification(models, loaded, tokenizer_folder):
    facts, _ = loaded
    tokenizer = Tokenizer(tokenizer_folder)
    ids = [2, *tokenizer.encode("the cat"), 3, *tokenizer.encode("a dog"), 3]
    row = torch.nn.functional.pad(torch.tensor([ids]), (0, max(0, ROW_LENGTH - len(ids))))
    probabilities = models[1]["classifier"].predict(LabelledBatch(row, None))[0].softmax(-1).tolist()
    found = {entry["label"]: entry["score"] for entry in facts["classified"]}
    assert found == pytest.approx(dict(zip(LABELS, probabilities, strict=True)), abs=1e-5)


@torch.no_grad()
def test_question_answering_answers_as_finetuning_scores(models, loaded, tokenizer_folder):
    facts, _ = loaded
    questions = [Question(str(number), **texts, answers=()) for number, texts in enumerate(QUESTIONS)]
    rows = QuestionRows(questions, Tokenizer(tokenizer_folder), ROW_LENGTH, STRIDE, has_unanswerable=True)
    summaries = rows.summarize(models[1]["spans"].predict(rows.batch(np.arange(rows.num_rows))))
    texts, null_odds = rows.answers(summaries.numpy())
    for found, asked, text, odds in zip(facts["answers"], QUESTIONS, texts.values(), null_odds.values(), strict=True):
        assert found["answer"] == text != ""
        assert asked["context"][found["start"] : found["end"]] == text
        assert found["score"] == pytest.approx(1 / (1 + math.exp(odds)), abs=1e-5)
    assert facts["answers of other windows"] != facts["answers"]
    assert facts["answer or nothing"]["answer"] == ("" if null_odds["0"] > 0 else texts["0"])


def test_the_code_of_an_export_is_the_package_s_own(models):
    folder, _ = models
    package = Path(__file__).parents[2] / "gmlp_scale"
    for name in ("gmlp", "mixer", "transformer", "backbone", "toeplitz"):
        ours, exported = ((place / f"{name}.py").read_text() for place in (package / "models", folder / "gmlp"))
        changed = [line for line in exported.splitlines() if line not in ours.splitlines()]
        assert all(line.startswith("from .") for line in changed)
