"""Tokenizers, small models and their exports; a pretrained run and launch/export.py."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gmlp_scale.checkpoint.trained import TrainedModel, head_class
from gmlp_scale.data.tokenizer import train_tokenizer
from gmlp_scale.export.folder import write_export
from gmlp_scale.models import ModelConfig, build_model
from launch.export import main
from tests.forked import ROOT, Script
from tests.models.every_kind import KINDS, TINY, perturb
from tests.written_shards import VOCAB_SIZE as RUN_VOCAB_SIZE
from tests.written_shards import add_tokenizer, write_tiny_shards

VOCAB_SIZE = 420
SENTENCE = "the cat and a dog went over to see what some people of that town had done with their old ship at sea"
WORDS = SENTENCE.split()
TEXTS = [
    f"{' '.join(WORDS[i % 7 :: 1 + i % 3])} {WORDS[i % 20]}ing, naïve <b>café</b> {i}<{i + 1}.\n" for i in range(500)
]
RECIPE = [
    "engine.kind=single", "model.num_blocks=2", "model.d_model=16", "model.d_ffn=32", "model.sequence_length=32",
    f"model.vocab_size={RUN_VOCAB_SIZE}", "train.num_steps=4", "train.global_batch_size=4",
    "train.micro_batch_size=4", "train.evaluate_every_steps=2", "train.num_evaluation_rows=4",
    "optimizer.warmup_steps=2", "checkpoint.save_every_steps=3", "data.cache_max_bytes=1000000",
]  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    """Of 420 pieces, some of which hold a "<"."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, VOCAB_SIZE, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_export(tokenizer_folder):
    """tiny_export(kind, folder, ...) -> the model that was written to the folder; no parameter is at its start."""

    def export(
        kind: str,
        folder: Path,
        head="masked_language_model",
        labels=(),
        sequence_length=TINY["sequence_length"],
        document_stride=None,
        masks_padding=True,
        **fields,
    ) -> torch.nn.Module:
        sizes = {"vocab_size": VOCAB_SIZE, "sequence_length": sequence_length, "masks_padding": masks_padding}
        config = TypeAdapter(ModelConfig).validate_python(TINY | KINDS[kind] | sizes)
        model = build_model(config, head=head_class(head, len(labels))).eval()
        model.init_weights(torch.Generator().manual_seed(0))
        perturb(model)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        details = {"step": 3, "heldout": {"step": 2, "perplexity": 17.25}, "config": {"name": kind}}
        fields = {"tokenizer_folder": tokenizer_folder, "details": details} | fields
        write_export(
            TrainedModel("tiny", config, head, weights, labels=labels, **fields),
            folder,
            document_stride=document_stride,
        )
        return model

    return export


@pytest.fixture
def export(tiny_export, tmp_path):
    """The folder of an aMLP's export, which the test may change."""
    tiny_export("amlp", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory) -> Path:
    """A run of 4 steps with checkpoints after steps 3 and 4, evaluated after 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    write_tiny_shards(folder / "shards", [16], [4], sequence_length=32)
    add_tokenizer(folder / "shards")
    places = [
        f"data.shards={folder / 'shards'}",
        f"data.cache_dir={folder / 'cache'}",
        f"output_dir={folder}",
        "name=tiny",
    ]
    recipe = ROOT / "configs" / "pretrain" / "smoke.yaml"
    code, _, errors = Script("launch/pretrain.py", ["--config", recipe, *RECIPE, *places]).end()
    assert code == 0, errors
    return folder / "tiny"


@pytest.fixture
def launched_export(launched):
    """launched_export(options...) -> (exit code, what it printed, its error)."""
    return partial(launched, main)


@pytest.fixture
def export_of_run(run_dir, tmp_path, succeeds):
    """export_of_run(options...) -> the folder into which launch/export.py wrote the run's newest checkpoint."""

    def export(*options) -> Path:
        succeeds(main, "--run", run_dir, "--output", tmp_path / "hf", *options)
        return tmp_path / "hf"

    return export


@pytest.fixture
def exported(succeeds):
    """exported(options...) -> what launch/export.py printed."""
    return partial(succeeds, main)
