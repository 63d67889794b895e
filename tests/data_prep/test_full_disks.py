"""Data jobs on full disks of several sizes: one message that names the file, no half-written file, and the same command
goes on once there is room."""

import resource
from functools import partial
from pathlib import Path

import pytest

from tests.data_prep.corpora import contents, run
from tests.forked import Script, fork_server
from tests.written_images import write_image_folder

TOKENIZE = ["--sequence-length", 32, "--heldout-fraction", 0.1, "--shard-bytes", 20_000]
IMAGES = ["--heldout-fraction", 0.25, "--images-per-shard", 5]


@pytest.fixture
def command(request, corpus, tokenizer_dir, tmp_path) -> list:
    """The script named by the test's parameter, with its options but --output."""
    match request.param:
        case "tokenize_corpus.py":
            return [request.param, "--input", f"{corpus}/*.gz", "--tokenizer", tokenizer_dir, *TOKENIZE]
        case "prepare_images.py":
            return [request.param, "--input", write_image_folder(tmp_path / "photos"), *IMAGES]
        case "train_tokenizer.py":
            return [request.param, "--input", f"{corpus}/*.gz", "--vocab-size", 380]


def _limited(num_bytes: int) -> None:
    """No file of this process or its workers may become longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    fork_server()


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        ("tokenize_corpus.py", (700, 1000, 4000, 15_000)),
        ("prepare_images.py", (700, 1000, 6000)),
        ("train_tokenizer.py", (700, 1000)),
    ],
    indirect=["command"],
)
def test_a_job_on_a_full_disk_leaves_no_half_written_file_and_goes_on_later(command, sizes, tmp_path, trials):
    script, *options = command
    run(script, *options, "--output", tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for size in sizes:
        output = tmp_path / f"out-{size}"
        limited = Script(f"data_prep/{script}", [*options, "--output", output], prepare=partial(_limited, size))
        code, _, errors = limited.end()
        assert code == 1 and errors.count("File too large") == 1 and "Traceback" not in errors, (code, errors)
        if script != "train_tokenizer.py":  # it trains in the folder for temporary files
            assert str(output) in errors and "make room there; the same command again goes on" in errors
        found = contents(output)
        assert found.items() < expected.items() and not list(Path(output).rglob("*.tmp"))
        assert not {"manifest.json", "tokenizer.model"} & found.keys()
        run(script, *options, "--output", output)
        assert contents(output).keys() == expected.keys()
        assert all(contents(output)[name] == expected[name] for name in expected.keys() - {"training.json"})
    trials("full disk during logs, cache and data jobs", len(sizes))
