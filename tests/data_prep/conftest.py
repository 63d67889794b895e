"""A tokenizer and a small corpus."""

from pathlib import Path

import pytest
from hypothesis import settings

from gmlp_scale.data.tokenizer import train_tokenizer
from tests.data_prep.corpora import make_texts, run, write_jsonl

settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(make_texts(600), 400, folder)
    return folder


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Three gzip files of JSON lines with 900 documents."""
    for number in range(3):
        write_jsonl(tmp_path / f"corpus/part-{number}.jsonl.gz", make_texts(300, number))
    return tmp_path / "corpus"


@pytest.fixture(scope="session")
def shards_to_read(tokenizer_dir, tmp_path_factory) -> Path:
    """Shards of rows of 32 made from the same three files, for tests that only read them."""
    folder = tmp_path_factory.mktemp("shards_to_read")
    for number in range(3):
        write_jsonl(folder / f"corpus/part-{number}.jsonl.gz", make_texts(300, number))
    run("tokenize_corpus.py", "--input", f"{folder}/corpus/*.gz", "--tokenizer", tokenizer_dir, "--sequence-length", 32,
        "--output", folder / "shards", "--heldout-fraction", 0.1, "--shard-bytes", 20_000)  # fmt: skip
    return folder / "shards"
