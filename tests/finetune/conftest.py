"""Tiny exports, data and recipes to finetune in a second, with the small tokenizer and files of tests/tasks."""

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from gmlp_scale.checkpoint.trained import TrainedModel
from gmlp_scale.export.folder import write_export
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.models import ModelConfig, build_model
from gmlp_scale.recipe.reader import load_config
from tests.tasks import conftest as tasks

tokenizer_folder, write_squad = tasks.tokenizer_folder, tasks.write_squad

RECIPES = Path(__file__).parents[2] / "configs" / "finetune"
GOOD, BAD = ("good", "great", "wonderful", "charming"), ("bad", "awful", "terrible", "boring")


def write_tiny_export(folder: Path, tokenizer_folder: Path, **changes) -> Path:
    sizes = {"kind": "gmlp", "num_blocks": 2, "d_model": 16, "d_ffn": 32, "sequence_length": 128, "vocab_size": 400}
    config = TypeAdapter(ModelConfig).validate_python(sizes | {"masks_padding": True} | changes)
    model = build_model(config)
    model.init_weights(torch.Generator().manual_seed(7))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    facts = {"details": {"step": 3}, "tokenizer_folder": tokenizer_folder}
    write_export(TrainedModel("tiny", config, "masked_language_model", (), weights, **facts), folder)
    return folder


def write_sentiment(path: Path, num_rows: int, first: int = 0) -> Path:
    """SST-2 in which one word decides the label; no two sentences are equal."""
    places = ("film", "story", "journey", "music", "acting")
    lines = ["sentence\tlabel"]
    for number in range(first, first + num_rows):
        words = (BAD, GOOD)[number % 2]
        word, place, other = words[number // 2 % 4], places[number // 8 % 5], places[number // 40 % 5]
        lines.append(f"the {word} {place} and {other} {number}\t{number % 2}")
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_run(tmp_path: Path, export: Path, *overrides: str, task: str = "sst2") -> FinetuneConfig:
    """A recipe of configs/finetune made small: rows of 16 tokens, 12 steps of 8 rows in float32."""
    defaults = [
        f"output_dir={tmp_path / 'outputs'}", f"model={export}", "data.sequence_length=16",
        "train.num_epochs=null", "train.num_steps=12", "train.global_batch_size=8", "train.micro_batch_size=4",
        "train.precision=float32", "train.log_every_steps=1", "train.evaluate_every_steps=5",
        "optimizer.peak_learning_rate=1e-3", "checkpoint.save_every_steps=4",
        "grid.global_batch_size=[8, 16]", "grid.peak_learning_rate=[1e-3]",
    ]  # fmt: skip
    return load_config(FinetuneConfig, RECIPES / f"{task}.yaml", [*defaults, *overrides])


def sentiment_run(tmp_path: Path, export: Path, *overrides: str) -> FinetuneConfig:
    train, dev = tmp_path / "train.tsv", tmp_path / "dev.tsv"
    if not train.exists():
        write_sentiment(train, 60)
        write_sentiment(dev, 21, first=60)
    return tiny_run(tmp_path, export, f"data.train={train}", f"data.dev={dev}", *overrides)


@pytest.fixture(scope="session")
def export(tmp_path_factory, tokenizer_folder) -> Path:
    """A tiny gMLP of 128 positions."""
    torch.set_num_threads(1)
    return write_tiny_export(tmp_path_factory.mktemp("export") / "gmlp", tokenizer_folder)
