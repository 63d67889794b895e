"""Small pretrained runs of three kinds, on shards whose tokenizer lies beside them."""

import random
from pathlib import Path

import pytest

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.run import pretrain
from tests import whole_runs
from tests.gloo_ranks import run_ranks
from tests.written_shards import VOCAB_SIZE, change_manifest, write_tiny_shards

SEQUENCE_LENGTH = 32
RECIPE = [
    *whole_runs.RECIPE, "engine.kind=single", "train.num_steps=4", "train.global_batch_size=4",
    "train.micro_batch_size=4", "train.evaluate_every_steps=2", "train.num_evaluation_rows=4", "train.device=cpu",
    "train.precision=float32", "train.compile=false",
]  # fmt: skip
KINDS = {
    "gmlp": [],
    "amlp": ["model.kind=amlp", "model.d_attn=8"],
    "transformer": ["model.kind=transformer", "model.num_heads=2", "model.positions=relative"],
}


def write_shards(folder: Path, tokenizer_folder: Path, sequence_length: int = SEQUENCE_LENGTH, seed: int = 0) -> None:
    """16 training rows and 6 held-out ones of random ids, said to be of that tokenizer."""
    write_tiny_shards(folder, [16], [6], sequence_length=sequence_length, seed=seed)
    change_manifest(folder, tokenizer_sha256=Tokenizer(tokenizer_folder).sha256)


def write_runs(folder: Path) -> None:
    """shards/, and for each kind a run of 4 steps, saved and evaluated after steps 2 and 4."""
    letters = random.Random(0)
    texts = [" ".join("".join(letters.choices("abcdefghijklmnopqrst", k=5)) for _ in range(20)) for _ in range(300)]
    train_tokenizer(texts, VOCAB_SIZE, folder / "shards" / "tokenizer")
    write_shards(folder / "shards", folder / "shards" / "tokenizer")
    run_ranks(_pretrain, 1, folder)


def _pretrain(folder: Path) -> None:
    for kind, fields in KINDS.items():
        places = [f"data.shards={folder / 'shards'}", f"output_dir={folder}", f"name={kind}"]
        pretrain(load_run_config(whole_runs.SMOKE, [*RECIPE, *fields, *places]))


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """The folder of write_runs, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder)
    return folder
