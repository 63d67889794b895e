"""Tokenizers, small models and their exports."""

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gmlp_scale.data.tokenizer import train_tokenizer
from gmlp_scale.export.folder import write_export
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.trained import head_class
from tests.models.every_kind import KINDS, TINY, perturb

VOCAB_SIZE = 420
SENTENCE = "the cat and a dog went over to see what some people of that town had done with their old ship at sea"
WORDS = SENTENCE.split()
TEXTS = [
    f"{' '.join(WORDS[i % 7 :: 1 + i % 3])} {WORDS[i % 20]}ing, naïve <b>café</b> {i}<{i + 1}.\n" for i in range(500)
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """Of 420 pieces, some of which hold a "<"."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, VOCAB_SIZE, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_export(tokenizer_folder):
    """tiny_export(kind, folder, ...) -> the model that was written to the folder; no parameter is at its start."""

    def export(kind: str, folder: Path, head="masked_language_model", labels=(), **fields) -> torch.nn.Module:
        config = TypeAdapter(ModelConfig).validate_python(TINY | KINDS[kind] | {"vocab_size": VOCAB_SIZE})
        model = build_model(config, head=head_class(head, len(labels))).eval()
        model.init_weights(torch.Generator().manual_seed(0))
        perturb(model)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        details = {"step": 3, "heldout": {"step": 2, "perplexity": 17.25}, "config": {"name": kind}}
        fields = {"tokenizer_folder": tokenizer_folder, "details": details, "head": head, "labels": labels} | fields
        write_export(folder, config, weights, **fields)
        return model

    return export
