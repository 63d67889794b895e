"""Sweeps of finetuning that are killed at a file operation, or whose disk is full: the same command finishes them."""

import os
import resource
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale.checkpoint.trained import read_export
from tests.finetune.conftest import RECIPES, export, tokenizer_folder, write_sentiment  # noqa: F401
from tests.forked import Script

pytestmark = pytest.mark.faults

OPERATIONS = ("replace", "rename", "link", "unlink", "mkdir", "rmdir", "fsync")
FIELDS = [
    "data.sequence_length=16", "train.num_epochs=null", "train.num_steps=6", "train.micro_batch_size=4",
    "train.device=cpu", "train.precision=float32", "train.log_every_steps=1", "train.evaluate_every_steps=2",
    "checkpoint.save_every_steps=3", "grid.global_batch_size=[8, 16]", "grid.peak_learning_rate=[1e-3]",
]  # fmt: skip


def _count(kill_at: int | None, trace: Path) -> None:
    """Adds a byte to `trace` for every operation on files, and kills this process before one of them."""
    done = 0

    def counted(*arguments, operation, **options):
        nonlocal done
        done += 1
        with trace.open("ab") as file:
            file.write(b".")
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments, **options)

    for name in OPERATIONS:
        setattr(os, name, partial(counted, operation=getattr(os, name)))


def _limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, export):  # noqa: F811
    """sweep(folder, prepare) -> (exit code, errors)."""
    data = tmp_path_factory.mktemp("data")
    parts = {"train": write_sentiment(data / "train.tsv", 60), "dev": write_sentiment(data / "dev.tsv", 21, first=60)}
    (data / "test.tsv").write_text("sentence\nthe good film\nthe bad film\n")
    places = [f"data.{part}={path}" for part, path in {**parts, "test": data / "test.tsv"}.items()]

    def run(folder: Path, prepare=None) -> tuple[int, str]:
        words = ["--config", RECIPES / "sst2.yaml", "--grid", "--seeds", 2, f"output_dir={folder}", f"model={export}"]
        code, _, errors = Script("launch/finetune.py", [*words, *places, *FIELDS], prepare=prepare).end()
        return code, errors

    return run


@pytest.fixture(scope="module")
def whole(sweep, tmp_path_factory) -> Path:
    """The folder of a sweep that nothing disturbed. `trace` in it has a byte for each operation on files."""
    folder = tmp_path_factory.mktemp("whole")
    code, errors = sweep(folder, partial(_count, None, folder / "trace"))
    assert code == 0, errors
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    """Tables, predictions and weights are those of the whole sweep, and no copy of weights is left over."""
    for path in [*whole.rglob("table.*"), *whole.rglob("SST-2.tsv")]:
        assert (folder / path.relative_to(whole)).read_text() == path.read_text()
    for path in [*whole.glob("sst2/*/best"), *whole.glob("sst2/*/last")]:
        found, expected = read_export(folder / path.relative_to(whole)).weights, read_export(path).weights
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert {path.parent.name for path in folder.rglob("model.safetensors")} == {"best", "last"}


def test_a_killed_sweep_is_finished_by_the_same_command(sweep, whole, tmp_path, trials):
    num_operations = (whole / "trace").stat().st_size
    points = [
        *range(14, num_operations, 20),
        30,
        31,
        75,
    ]  # these three replace best/ or last/
    for number, point in enumerate(points):
        folder = tmp_path / str(number)
        code, errors = sweep(folder, partial(_count, point, tmp_path / "trace"))
        assert code == -signal.SIGKILL, errors
        code, errors = sweep(folder)
        assert code == 0, errors
        assert_same(folder, whole)
    trials("finetuning sweep killed at a file operation", len(points))


@pytest.mark.parametrize("num_bytes", [500, 2_000, 6_000, 20_000])
def test_a_sweep_on_a_full_disk_says_so_and_goes_on_later(sweep, whole, num_bytes, tmp_path, trials):
    code, errors = sweep(tmp_path, partial(_limit_files, num_bytes))
    assert code == 1 and "Traceback" not in errors
    if num_bytes > 2_000:  # else standard error, a file here, has no room for the message
        assert "File too large" in errors.splitlines()[-1] and "/best.new" in errors.splitlines()[-1]
    assert not list(tmp_path.rglob("model.safetensors"))
    code, errors = sweep(tmp_path)
    assert code == 0, errors
    assert_same(tmp_path, whole)
    trials("full disk during logs, cache and data jobs", 1)
