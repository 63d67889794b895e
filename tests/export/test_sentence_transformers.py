"""Exports in sentence-transformers: an embedding is the mean over a text's tokens, alone and in a batch."""

import json
import logging

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from tests.models.every_kind import TINY

TEXTS = ["the cat", "a dog went over to see", "what some people of that town had done with their old ship at sea"]


@pytest.fixture(scope="module", params=["gmlp", "amlp", "mixer", "bert-relative"])
def folder(request, tiny_export, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports") / "hf"
    tiny_export(request.param, folder)
    return folder


def opened(folder) -> SentenceTransformer:
    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


@torch.no_grad()
def test_an_embedding_is_the_mean_over_the_tokens_of_a_text_alone(folder):
    encoder = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), opened(folder)
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, return_tensors="pt")["input_ids"]
        expected_D = encoder(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(model.encode(text, convert_to_tensor=True), expected_D, rtol=0, atol=1e-5)


def test_an_embedding_in_a_batch_is_that_of_the_text_alone(folder):
    model = opened(folder)
    alone_TD = torch.stack([model.encode(text, convert_to_tensor=True) for text in TEXTS])
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), alone_TD, rtol=0, atol=1e-5)


def test_the_files_leave_nothing_to_the_library_s_defaults(export, caplog):
    with caplog.at_level(logging.INFO, logger="sentence_transformers"):
        model = opened(export)
    assert "Loading SentenceTransformer model from" in caplog.text
    assert model.max_seq_length == TINY["sequence_length"] and model.similarity_fn_name == "cosine"
    encoder, pooling = model
    assert type(encoder.model).__name__ == "GmlpScaleModel" and pooling.pooling_mode == "mean"
    assert pooling.embedding_dimension == TINY["d_model"]


def test_the_files_decide(export):
    path = export / "1_Pooling" / "config.json"
    changed = json.loads(path.read_text()) | {"pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}
    path.write_text(json.dumps(changed))
    (export / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5, "do_lower_case": False}))
    model = opened(export)
    assert model.max_seq_length == 5 and model[1].pooling_mode == "max"


def test_finetuned_rows_set_the_length(tiny_export, tmp_path):
    tiny_export("gmlp", tmp_path / "hf", "sequence_classification", ("no", "yes"), row_length=8)
    model = opened(tmp_path / "hf")
    assert model.max_seq_length == 8
    assert torch.equal(
        model.encode(TEXTS[2], convert_to_tensor=True), model.encode(f"{TEXTS[2]} again", convert_to_tensor=True)
    )
