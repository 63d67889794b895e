"""Whole pretraining runs on real processes: stopped, killed, damaged, resumed, moved between engines, refused."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.data.loader import Loader
from gmlp_scale.export.card import Publication, model_card
from gmlp_scale.plan.describe import describe
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.storage.run_folder import claimed
from tests.whole_runs import (
    CHANGING,
    FSDP2,
    NUM_STEPS,
    RECIPE,
    ROOT,
    SINGLE,
    SMOKE,
    ZERO1,
    ZERO2,
    ZERO3,
    assert_close,
    events_of,
    finish,
    logged,
    refused,
    run_in_turn,
    start,
)
from tests.written_shards import add_tokenizer, write_tiny_shards


@pytest.fixture(scope="module")
def undisturbed_run(forty_rows, tmp_path_factory):
    """undisturbed_run(engine, world_size, fields) -> the folder of a run of CHANGING that was never stopped."""
    folder, known = tmp_path_factory.mktemp("undisturbed"), {}

    def run(engine: list[str], world_size: int, *fields: str) -> Path:
        key = (*engine, world_size, *fields)
        if key not in known:
            known[key] = folder / f"run_{len(known)}"
            places = [f"data.shards={forty_rows}", f"output_dir={folder}", f"name={known[key].name}"]
            run_in_turn(world_size, [*CHANGING, *engine, *places, *fields])
        return known[key]

    return run


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run):
    """What such a run logged."""
    return lambda *run: logged(undisturbed_run(*run))


@pytest.mark.parametrize(
    "engine, world_size",
    [
        (SINGLE, 1),
        (FSDP2, 2),
        pytest.param(ZERO1, 2, marks=pytest.mark.faults),
        pytest.param(ZERO3, 2, marks=pytest.mark.faults),
    ],
    ids=str,
)
def test_a_run_resumed_twice_is_bit_identical_to_one_never_stopped(
    engine, world_size, forty_rows, undisturbed, tmp_path, trials
):
    recipe = [*CHANGING, *engine, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    stops = [[*recipe, f"train.stop_after_step={step}"] for step in (3, 6)]
    run_in_turn(world_size, *stops, recipe)
    assert logged(tmp_path / "smoke") == undisturbed(engine, world_size)
    trials("resume in a later epoch, at an epoch's end, 100 batches on", 2)


def test_one_run_moves_between_engines_and_world_sizes(forty_rows, undisturbed, tmp_path, trials):
    recipe = [*CHANGING, f"data.shards={forty_rows}", f"output_dir={tmp_path}", "train.log_filters=true"]
    run_in_turn(2, [*recipe, *ZERO2, "train.stop_after_step=3"])
    run_in_turn(1, [*recipe, *FSDP2, "train.stop_after_step=6", "train.micro_batch_size=4"])
    run_in_turn(2, [*recipe, *ZERO3])
    assert_close(logged(tmp_path / "smoke"), undisturbed(SINGLE, 1))
    assert [picture.step for picture in events_of(tmp_path / "smoke").Images("filters")] == [4, 8, 9]
    trials("world size 2 to 1 to 4, other micro-batch", 2)


@pytest.mark.parametrize("engine", [FSDP2, ZERO3], ids=str)
@pytest.mark.parametrize(
    "start",
    ["branch_from={}@6 train.num_steps=8 optimizer.decay_steps=1", "init_from={} train.stop_after_step=4"],
    ids=["branch", "init_from"],
)
def test_a_branch_and_a_start_from_weights_are_those_of_one_process(
    start, engine, forty_rows, undisturbed, undisturbed_run, tmp_path
):
    fields = start.format(undisturbed_run(SINGLE, 1)).split()
    run_in_turn(2, [*CHANGING, *engine, f"data.shards={forty_rows}", f"output_dir={tmp_path}", *fields])
    assert_close(logged(tmp_path / "smoke"), undisturbed(SINGLE, 1, *fields))


@pytest.mark.parametrize(
    "engine, world_size, signalled",
    [(ZERO2, 2, signal.SIGTERM), (FSDP2, 2, signal.SIGUSR1), (SINGLE, 1, signal.SIGINT)],
)
def test_a_stop_signal_to_one_rank_ends_all_with_a_checkpoint(
    engine, world_size, signalled, forty_rows, undisturbed, tmp_path, trials
):
    recipe = [
        *CHANGING,
        *engine,
        "checkpoint.save_every_steps=1000",
        f"data.shards={forty_rows}",
        f"output_dir={tmp_path}",
    ]
    finish(start(recipe, world_size, signals={world_size - 1: signalled}))
    stopped_at = logged(tmp_path / "smoke")[-1]["step"]
    assert 4 <= stopped_at < NUM_STEPS
    checkpoints = sorted(path.name for path in (tmp_path / "smoke" / "checkpoints").iterdir())
    assert checkpoints == [f"step_{stopped_at:09d}"]
    finish(start(recipe, world_size))
    steps = [row for row in logged(tmp_path / "smoke") if "train/loss" in row]
    assert steps == [row for row in undisturbed(engine, world_size) if "train/loss" in row]
    trials("SIGTERM, SIGUSR1 or SIGINT to a rank", 1)


def test_a_killed_rank_is_named_and_the_run_resumes_from_its_newest_complete_checkpoint(
    forty_rows, undisturbed, tmp_path, trials
):
    recipe = [*CHANGING, *ZERO1, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    (code, _, errors), (code_of_lost, _, _) = [rank.end() for rank in start(recipe, 2, signals={1: signal.SIGKILL})]
    assert (code, code_of_lost) == (1, -signal.SIGKILL) and "Traceback" not in errors
    assert re.match(r"rank 1 \(host \S+\) does not answer; rank 0 waited in .* step \d", errors.splitlines()[-1])
    assert "resuming from" in finish(start(recipe, 2))
    assert logged(tmp_path / "smoke") == undisturbed(ZERO1, 2)
    trials("SIGKILL of a random rank at a random step", 1)


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(forty_rows, undisturbed, tmp_path, trials):
    recipe = [*CHANGING, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, "train.stop_after_step=4"])
    damaged = next((tmp_path / "smoke" / "checkpoints" / "step_000000004").glob("*.safetensors"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    output = finish(start(recipe))
    assert "step_000000004" in output and "Taking step_000000002 instead" in output
    assert logged(tmp_path / "smoke") == undisturbed(SINGLE, 1)
    trials("a checkpoint's bit flipped, byte zeroed, file cut or longer", 1)


@pytest.mark.parametrize("engine, world_size", [(SINGLE, 1), (FSDP2, 2), (ZERO2, 2)], ids=str)
def test_a_loss_that_is_not_finite_stops_every_rank_and_keeps_the_last_good_checkpoint(
    engine, world_size, forty_rows, tmp_path, trials
):
    recipe = [
        *RECIPE, *engine, f"data.shards={forty_rows}", f"output_dir={tmp_path}",
        "optimizer.peak_learning_rate=1e30", "checkpoint.save_every_steps=1", "train.log_every_steps=5",
    ]  # fmt: skip
    for rank in start(recipe, world_size):
        code, _, output = rank.end()
        assert code == 2 and "Traceback" not in output
        assert "step 2: the loss on rank 0 (positions 8 to" in output and "is not finite" in output
    trained = read_run(tmp_path / "smoke")
    assert trained.step == 1
    assert all(weight.isfinite().all() for weight in trained.weights.values())
    trials("NaN, Inf or a 10,000-fold loss in one rank's batch", 1)


def test_a_second_job_on_the_same_run_folder_is_refused(forty_rows, tmp_path, trials):
    with claimed(tmp_path / "smoke"):
        error = refused([*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"], code=1)
    assert f"process {os.getpid()} on host" in error
    trials("two jobs on one folder", 1)


def test_checkpoints_written_without_asserts_are_whole(forty_rows, undisturbed, tmp_path):
    words = [str(SMOKE), *CHANGING, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    command = ["launch/pretrain.py", "--config", *words]
    for options in (["-O", *command, "train.stop_after_step=4"], command):
        done = subprocess.run([sys.executable, *options], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "step_000000004" in done.stderr and logged(tmp_path / "smoke") == undisturbed(SINGLE, 1)


def _fail_to_read(rank: int, at_step: int) -> None:
    """The rank's disk fails as it reads the batch of this step."""
    unbroken = Loader.steps

    def steps(loader, start_step, stop_step):
        for step, micro_batches in enumerate(unbroken(loader, start_step, stop_step), start_step + 1):
            if step == at_step and os.environ.get("RANK", "0") == str(rank):
                raise OSError(5, "Input/output error", "train-00001.tar")
            yield micro_batches

    Loader.steps = steps


@pytest.mark.parametrize("engine, world_size", [(SINGLE, 1), (FSDP2, 2), (ZERO1, 2), (ZERO2, 2), (ZERO3, 2)], ids=str)
def test_a_data_error_on_one_rank_saves_the_last_finished_step(
    engine, world_size, forty_rows, undisturbed, tmp_path, trials
):
    """At step 6 the batch grows, so the ranks must do other micro-batches than in the step before."""
    recipe = [*CHANGING, *engine, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    disturbed = [*recipe, "checkpoint.save_every_steps=1000"]
    ranks = start(disturbed, world_size, prepare=partial(_fail_to_read, world_size - 1, 6))
    *others, (code, _, error) = [rank.end() for rank in ranks]
    assert code == 1 and error.splitlines()[-1] == "[Errno 5] Input/output error: 'train-00001.tar'", error
    for code, _, error in others:
        assert code == 1 and "Traceback" not in error
        assert re.match(
            r"rank 1 \(host \S+\) had no batch for step 6; the message there says why", error.splitlines()[-1]
        )
    assert [folder.name for folder in (tmp_path / "smoke/checkpoints").iterdir()] == ["step_000000005"]
    finish(start(recipe, world_size))
    assert logged(tmp_path / "smoke") == undisturbed(engine, world_size)
    trials("a data error on one rank", 1)


def test_a_refused_start_leaves_no_folder(tmp_path):
    assert "no shards at" in refused([*RECIPE, *SINGLE, f"data.shards={tmp_path}/nowhere", f"output_dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_another_is_not_resumed(forty_rows, tmp_path, trials):
    recipe = [*RECIPE, *SINGLE, f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, f"data.shards={forty_rows}", "train.stop_after_step=2"])
    write_tiny_shards(tmp_path / "other", [40], [12], sequence_length=32, seed=5)
    add_tokenizer(tmp_path / "other")
    changed = [*recipe, f"data.shards={tmp_path / 'other'}", "seed=7", "optimizer.peak_learning_rate=1e-3"]
    output = refused(changed)
    assert "seed: the checkpoint was trained with 0; the run says 7" in output
    assert "optimizer.peak_learning_rate" in output and "data manifest_sha256" in output
    assert "3 mistakes" in output
    assert "old values and data; or, to go on with the new values, 'train.allow_changed_on_resume=[" in output
    allowed = ["train.allow_changed_on_resume=[optimizer.peak_learning_rate]", f"data.shards={forty_rows}", "seed=0"]
    output = finish(start([*changed, *allowed]))
    assert "optimizer.peak_learning_rate may differ" in output
    trials("other data, tokenizer, seed or model on resume", 3)


@pytest.mark.parametrize("allowed", [[], ["train.allow_changed_on_resume=[model.d_model]"]], ids=["", "allowed"])
def test_a_model_with_other_parameters_is_never_resumed(allowed, forty_rows, tmp_path):
    recipe = [*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, "train.stop_after_step=2"])
    output = refused([*recipe, "model.d_model=8", *allowed])
    assert "model.d_model: the checkpoint was trained with 16; the run says 8" in output
    assert re.search(r"parameters: blocks\.0\.\S+ is \(.*\b8\b.*\) and should be \(.*\b16\b.*and \d+ more", output)
    assert "another name=..." in output and "init_from" in output and "allow_changed_on_resume=" not in output


def test_a_second_source_joins_a_run_on_other_ranks(forty_rows, tmp_path):
    """The first source alone until the stop; then the same rows as in a run whose mixture was there from the start."""
    write_tiny_shards(tmp_path / "other", [12], [4], sequence_length=32, seed=5)
    add_tokenizer(tmp_path / "other")
    both = f"[{{shards: {forty_rows}, weight: 2}}, {{shards: {tmp_path / 'other'}, weight: 1, from_step: 3}}]"
    recipe = [*RECIPE, f"output_dir={tmp_path}", "train.num_steps=6"]
    run_in_turn(1, [*recipe, *SINGLE, f"data.shards={both}", "name=whole"])
    run_in_turn(1, [*recipe, *SINGLE, f"data.shards={forty_rows}", "train.stop_after_step=3"])
    joined = [*recipe, *FSDP2, f"data.shards={both}"]
    run_in_turn(2, [*joined, "train.allow_changed_on_resume=[data.shards]"])
    whole, resumed = logged(tmp_path / "whole"), logged(tmp_path / "smoke")
    assert resumed[2]["data/epoch"] == whole[2][f"data/epoch/{forty_rows.name}"] == 24 / 40
    assert whole[-2]["data/epoch/other"] == resumed[-2]["data/epoch/other"] == 8 / 12
    rows, others = ([{k: v for k, v in row.items() if "epoch" not in k} for row in run] for run in (resumed, whole))
    assert_close(rows, others)
    with pytest.raises(ConfigError, match="no source has rows for step 0"):
        load_run_config(SMOKE, [*recipe, f"data.shards=[{{shards: {forty_rows}, weight: 2, from_step: 1}}]"])
    trained = read_run(tmp_path / "whole")
    card = model_card(trained, Publication())
    assert f"{forty_rows} (weight 2), " in card and "| manifest of other | sha256 " in card
    epochs = f"epochs of the run       1.00 of {forty_rows.name}, 0.67 of other"
    assert epochs in describe(load_run_config(SMOKE, joined), 2)
