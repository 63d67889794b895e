"""launch/plot_model.py: every picture of small real runs and an export, as PNG and in TensorBoard."""

import shutil
from pathlib import Path

import matplotlib.image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.export.folder import export_checkpoint
from launch.plot_model import main

TEXTS = ["--text-a", "abcde $fgh$", "--text-b", "klmno"]
PICTURES = [
    ("gmlp", ["filters"]),
    ("gmlp", ["matrices", "--blocks", "1", "0"]),
    ("amlp", ["attention", *TEXTS]),
    ("amlp", ["attention", *TEXTS, "--blocks", "1"]),
]


def assert_is_a_picture(path: Path) -> None:
    pixels = matplotlib.image.imread(path)
    assert min(pixels.shape[:2]) > 100 and pixels.std() > 0.01


def images(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [event.step for event in events.Images(tag)] for tag in events.Tags()["images"]}


@pytest.mark.parametrize(("kind", "words"), PICTURES, ids=["filters", "matrices", "attention", "attention-blocks"])
def test_a_run_s_picture(runs, launched, tmp_path, kind, words):
    run_dir = Path(shutil.copytree(runs / kind, tmp_path / kind))
    path = tmp_path / "pictures" / "a.png"
    code, printed, error = launched(main, *words, "--run", run_dir, "--step", 2, "--output", path)
    assert (code, printed) == (0, f"{path}\n"), error
    assert_is_a_picture(path)
    assert images(run_dir / "tensorboard" / "pictures") == {words[0]: [2]}


def test_an_export_s_picture_is_its_run_s(runs, tmp_path, succeeds):
    run_dir = Path(shutil.copytree(runs / "gmlp", tmp_path / "gmlp"))
    export_checkpoint(read_run(run_dir, 4), run_dir, tmp_path / "hf")
    for place, name in ((["--run", run_dir], "run.png"), (["--export", tmp_path / "hf"], "export.png")):
        options = ["filters", *place, "--output", tmp_path / name, "--tensorboard", tmp_path / "board"]
        succeeds(main, *options)
    of_run, of_export = (matplotlib.image.imread(tmp_path / name) for name in ("run.png", "export.png"))
    assert (of_run == of_export).all()
    assert images(tmp_path / "board") == {"filters": [4, 4]}


def test_scaling(runs, tmp_path, succeeds):
    options = ["scaling", "--runs", runs / "gmlp", runs / "amlp", runs / "transformer", "--output", tmp_path / "a.png"]
    printed = succeeds(main, *options, "--tensorboard", tmp_path / "board")
    assert_is_a_picture(tmp_path / "a.png")
    assert images(tmp_path / "board") == {"scaling": [0]}
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["gmlp", "amlp", "transformer"]
    assert lines[3].startswith("perplexity = ") and "x parameters ^ " in lines[3]


def test_mistakes_are_one_message_and_leave_with_2(runs, tmp_path, refuses):
    output = ["--output", tmp_path / "a.png"]
    for options, message in (
        (["filters", "--run", runs / "transformer"], "has no spatial projections"),
        (["matrices", "--run", runs / "gmlp", "--blocks", 0, 2, -1], "no block 2, -1; there are 0 to 1"),
        (["attention", "--run", runs / "gmlp", *TEXTS], "has no tiny attention"),
        (["attention", "--run", runs / "amlp", "--text-a", "x " * 40, "--text-b", "y"], "takes at most 32"),
        (["scaling", "--runs", runs / "gmlp"], "needs two runs of different sizes"),
        (["scaling", "--runs", runs / "gmlp", tmp_path], "no run at"),
        (["filters", "--run", tmp_path], "no run at"),
        (["filters", "--export", tmp_path], "no export at"),
        (["filters", "--export", tmp_path, "--step", 2], "--step needs --run"),
    ):
        refuses(message, main, *options, *output)
    assert not (tmp_path / "a.png").exists()
