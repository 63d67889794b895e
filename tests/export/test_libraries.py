"""What users' libraries do with an export: save it again, train it, adapt it, and load its tokenizer alone."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import sentence_transformers
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)
from transformers.utils import is_accelerate_available

from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.export.hugging_face.modeling_gmlp import GmlpScaleForMaskedLM, GmlpScaleForTokenClassification
from tests.export.tiny_heads import HEADS, IDS, SHORT, labels_for, tiny_head
from tests.models.every_kind import KINDS

pytestmark = pytest.mark.usefixtures("no_launcher")
TRUSTED = {"trust_remote_code": True}
NEEDS_TRAINER = pytest.mark.skipif(not is_accelerate_available(), reason="Trainer needs accelerate")


def assert_finetuning_takes_it(folder: Path, tokenizer_folder: Path) -> None:
    assert read_export(folder).tokenizer().sha256 == Tokenizer(tokenizer_folder).sha256


def trainer(model, rows, folder: Path, **settings):
    from transformers import Trainer, TrainingArguments

    given = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    arguments = TrainingArguments(str(folder), **(given | settings))
    return Trainer(model, arguments, train_dataset=rows, data_collator=torch.utils.data.default_collate)


def test_a_saved_model_keeps_the_tokenizer_of_finetuning(export, tokenizer_folder, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(export, **TRUSTED)
    model.save_pretrained(tmp_path / "saved")
    AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", num_labels=3, **TRUSTED).save_pretrained(
        tmp_path / "again"
    )
    for name in ("saved", "again"):
        assert_finetuning_takes_it(tmp_path / name, tokenizer_folder)
    assert read_export(tmp_path / "again").head == "token_classification"
    scratch = AutoModelForMaskedLM.from_config(model.config, **TRUSTED)
    scratch.name_or_path = ""
    scratch.save_pretrained(tmp_path / "scratch")
    assert not (tmp_path / "scratch" / "tokenizer.model").exists()


def test_a_new_head_on_a_pretrained_model_answers_questions_once_it_is_saved(export, tokenizer_folder, tmp_path):
    model = AutoModelForQuestionAnswering.from_pretrained(export, **TRUSTED)
    model(IDS, start_positions=IDS[:, 0] % 3, end_positions=IDS[:, 1] % 3).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for part in (model, AutoTokenizer.from_pretrained(export)):
        part.save_pretrained(tmp_path / "saved")
    assert_finetuning_takes_it(tmp_path / "saved", tokenizer_folder)
    answer = pipeline("question-answering", model=str(tmp_path / "saved"), **TRUSTED)
    context = "the cat and a dog went over to see"
    found = answer(question="a dog", context=context)
    assert found["answer"] == context[found["start"] : found["end"]] != ""


@NEEDS_TRAINER
def test_a_checkpoint_of_trainer_keeps_the_tokenizer_of_finetuning(export, tokenizer_folder, tmp_path):
    model = AutoModelForMaskedLM.from_pretrained(export, **TRUSTED)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer(model, rows, tmp_path, save_strategy="steps", save_steps=1).train()
    assert_finetuning_takes_it(tmp_path / "checkpoint-1", tokenizer_folder)


def test_sentence_transformers_keep_the_tokenizer_of_finetuning(export, tokenizer_folder, tmp_path):
    model = sentence_transformers.SentenceTransformer(str(export), device="cpu", **TRUSTED)
    assert model.encode(["the cat", "a dog went over"]).shape == (2, 16)
    model.save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == (tokenizer_folder / "tokenizer.model").read_bytes()


def test_the_tokenizer_loads_without_trust_and_without_a_question(export, tokenizer_folder):
    code = "from transformers import AutoTokenizer; print(AutoTokenizer.from_pretrained('.')('the cat').input_ids)"
    given = {"cwd": export, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", code], **given)
    assert process.returncode == 0, process.stderr
    ids = list(map(int, re.findall(r"\d+", process.stdout.splitlines()[-1])))
    assert ids == [2, *Tokenizer(tokenizer_folder).encode("the cat"), 3]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_any_attention_implementation_loads_and_gives_the_same(export, implementation):
    plain, asked = (
        AutoModel.from_pretrained(export, **TRUSTED, **given) for given in ({}, {"attn_implementation": implementation})
    )
    with torch.no_grad():
        assert torch.equal(plain(IDS).last_hidden_state, asked(IDS).last_hidden_state)


@pytest.mark.parametrize("head", HEADS)
def test_names_that_other_encoders_take_are_taken(head):
    model = tiny_head(head)
    given = {"position_ids": torch.arange(SHORT)[None], "token_type_ids": IDS[:, :SHORT] % 2, "something_else": 3}
    with torch.no_grad():
        for found, expected in zip(
            model(IDS[:, :SHORT], **given, **labels_for(head, IDS[:, :SHORT])).to_tuple(),
            model(IDS[:, :SHORT], **labels_for(head, IDS[:, :SHORT])).to_tuple(),
            strict=True,
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["gmlp", "amlp", "bert-absolute"])
def test_padding_on_the_left_and_other_positions_are_refused(kind):
    model = tiny_head(GmlpScaleForMaskedLM, kind)
    left = torch.tensor([[1] * SHORT, [0] * 2 + [1] * (SHORT - 2), [1] * SHORT])
    embeddings = model.get_input_embeddings()(IDS[:, :SHORT])
    for given in (
        {"input_ids": IDS[:, :SHORT], "attention_mask": left},
        {"input_ids": IDS[:, :SHORT] * left},
        {"inputs_embeds": embeddings, "attention_mask": left},
    ):
        with pytest.raises(ValueError, match=r'a row begins with padding; .* tokenizer.padding_side = "right"'):
            model(**given)
    with pytest.raises(ValueError, match="position_ids are other than 0, 1, 2"):
        model(IDS[:, :SHORT], position_ids=torch.arange(1, SHORT + 1)[None])
    right = left.flip(1)
    positions = (right.cumsum(1) - 1).clamp(min=0)  # as some collators count them
    assert model(IDS[:, :SHORT], right, position_ids=positions).logits.isfinite().all()
    assert model(IDS[:, :SHORT], torch.zeros_like(left)).logits.isfinite().all()  # a row of padding alone


@NEEDS_TRAINER
@pytest.mark.parametrize("head", [GmlpScaleForTokenClassification, GmlpScaleForMaskedLM])
def test_trainer_counts_labels_over_accumulated_batches(head, tmp_path):
    """Two batches with other numbers of labels train as one batch of both: by the mean over all labels."""
    weights = []
    for rows_per_batch, num_batches in ((2, 1), (1, 2)):
        model = copy.deepcopy(tiny_head(head))
        labels = (IDS[:2] % 3).where(torch.arange(IDS.shape[1]) < torch.tensor([[2], [9]]), -100)
        rows = [{"input_ids": row, "labels": of_row} for row, of_row in zip(IDS[:2], labels, strict=True)]
        settings = {"per_device_train_batch_size": rows_per_batch, "gradient_accumulation_steps": num_batches}
        trainer(model, rows, tmp_path, optim="sgd", learning_rate=1.0, max_grad_norm=0.0, **settings).train()
        weights.append(model.state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_finds_the_matrices_over_channels_of_every_block(tiny_export, tmp_path, kind):
    tiny_export(kind, tmp_path / "hf")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", **TRUSTED)
    modules = model.model.blocks.named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear) and "spatial" not in name}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2))
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    found = {re.search(r"blocks\.(.*)\.lora_", name)[1] for name in names}
    assert found == linear
    adapted(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)


def test_peft_trains_and_saves_the_head_of_questions_that_it_is_given(export, tmp_path):
    given = {"task_type": "QUESTION_ANS", "modules_to_save": ["spans"]}
    model = AutoModelForQuestionAnswering.from_pretrained(export, **TRUSTED)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **given))
    adapted(input_ids=IDS, start_positions=IDS[:, 0] % 3, end_positions=IDS[:, 1] % 3).loss.backward()
    torch.optim.SGD((one for one in adapted.parameters() if one.requires_grad), lr=0.1).step()
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoModelForQuestionAnswering.from_pretrained(export, **TRUSTED)  # with another new head
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=IDS).start_logits, adapted.eval()(input_ids=IDS).start_logits)
