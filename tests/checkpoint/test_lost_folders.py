"""Runs whose folder, log or place for checkpoints is gone or no folder: each ends, or goes on, with words."""

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from gmlp_scale.checkpoint import pieces
from gmlp_scale.checkpoint.format import CheckpointError
from gmlp_scale.errors import InputError
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.sinks import read_metrics
from tests.checkpoint.fake_engine import FakeEngine, alone, names_in
from tests.whole_runs import FSDP2, NUM_STEPS, RECIPE, SINGLE, finish, refused, start


def _at_the_evaluation_of_step_4(action: Callable[[], None]) -> None:
    evaluate = Pretraining.evaluate

    def disturbed(task, engine, world, step):
        if step == 4 and world.is_main:
            action()
        return evaluate(task, engine, world, step)

    Pretraining.evaluate = disturbed


def _move(path: Path) -> None:
    path.rename(path.with_name("moved"))


def _delete(path: Path) -> None:
    _move(path)  # the save of step 4 may be making files in it
    shutil.rmtree(path.with_name("moved"), ignore_errors=True)


def _move_and_put_another_there(path: Path) -> None:
    _move(path)
    path.mkdir()
    (path / "LOCK").touch()


@pytest.mark.parametrize(
    "engine, vanish, lost",
    [
        (FSDP2, _move, "smoke"),
        (SINGLE, _move, "."),
        (SINGLE, _delete, "smoke"),
        (SINGLE, Path.unlink, "smoke/LOCK"),
        (SINGLE, _move_and_put_another_there, "smoke"),
    ],
)
def test_a_run_whose_folder_is_gone_ends_with_words_on_all_ranks(engine, vanish, lost, forty_rows, tmp_path, trials):
    output_dir, world_size = tmp_path / "outputs", 2 if engine == FSDP2 else 1
    recipe = [*RECIPE, *engine, f"data.shards={forty_rows}", f"output_dir={output_dir}"]
    prepare = partial(_at_the_evaluation_of_step_4, partial(vanish, output_dir / lost))
    codes, _, errors = zip(*[rank.end() for rank in start(recipe, world_size, prepare=prepare)], strict=True)
    assert codes[0] == 2 and all(codes) and not any("Traceback" in text for text in errors), errors
    assert f"{output_dir}/smoke, or its LOCK, was deleted or moved away: the run ends" in errors[0]
    assert "finished" not in "".join(errors)
    if vanish in (_move, _delete):
        assert not (output_dir / "smoke").exists(), "nothing was written to a new folder"
    trials("a run's folder, log or place for checkpoints that is gone or no folder", 1)


@pytest.mark.parametrize("vanish", [Path.unlink, _move])
def test_a_log_that_is_gone_is_written_anew_with_a_warning(vanish, forty_rows, tmp_path, trials):
    recipe = [*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    log = tmp_path / "smoke" / "metrics.jsonl"
    printed = finish(start(recipe, prepare=partial(_at_the_evaluation_of_step_4, partial(vanish, log))))
    assert printed.count(f"{log} was deleted or moved away: what follows is in a new file there") == 1
    steps = [row["step"] for row in read_metrics(log) if "train/loss" in row]
    assert steps == list(range(5, NUM_STEPS + 1))
    trials("a run's folder, log or place for checkpoints that is gone or no folder", 1)


@pytest.mark.parametrize(
    "make",
    [Path.touch, lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)],
    ids=["file", "dangling", "loop"],
)
def test_a_start_is_refused_where_checkpoints_can_never_be_saved(make, forty_rows, tmp_path, trials):
    (tmp_path / "smoke").mkdir()
    make(tmp_path / "smoke" / "checkpoints")
    error = refused([*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"])
    assert f"{tmp_path}/smoke/checkpoints cannot hold checkpoints (File exists)" in error
    assert set(names_in(tmp_path / "smoke")) <= {"LOCK", "checkpoints"}, "nothing else was written"
    trials("a run's folder, log or place for checkpoints that is gone or no folder", 1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_place_that_takes_no_files_is_refused(number, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("gmlp_scale.checkpoint.stores.tempfile.TemporaryFile", refuse)
    with pytest.raises(InputError, match=os.strerror(number)):
        alone(tmp_path / "checkpoints").newest()


def test_a_start_leaves_no_folder_and_a_full_disk_refuses_none(tmp_path, monkeypatch):
    def is_full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert alone(tmp_path / "checkpoints").newest() is None and names_in(tmp_path) == []
    monkeypatch.setattr("gmlp_scale.checkpoint.stores.tempfile.TemporaryFile", is_full)
    assert alone(tmp_path / "checkpoints").newest() is None


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ELOOP])
def test_what_never_passes_is_not_tried_again(number, tmp_path, monkeypatch):
    def refuse(tensors, path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pieces, "write_safetensors", refuse)
    checkpointer = alone(tmp_path)
    checkpointer.save(FakeEngine(), 1)
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        checkpointer.wait()  # before, it tried for ever
