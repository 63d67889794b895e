"""Whole pretraining runs on real processes: stopped, killed, damaged, resumed, moved between engines, refused."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from gmlp_scale import telling
from gmlp_scale.config import ConfigError
from gmlp_scale.export.card import Publication, model_card
from gmlp_scale.plan.describe import describe
from gmlp_scale.recipe_file import load_run_config
from gmlp_scale.run import pretrain
from gmlp_scale.saved_run import read_run
from gmlp_scale.tasks.pretraining import Pretraining
from gmlp_scale.train.log_files import read_metrics
from gmlp_scale.train.run_folder import claimed
from gmlp_scale.train.time_budget import TimeBudget
from launch.elastic import is_finished
from tests.forked import Script
from tests.gloo_ranks import rank_variables, run_ranks
from tests.written_shards import VOCAB_SIZE, add_tokenizer, write_tiny_shards

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "configs" / "pretrain" / "smoke.yaml"
NUM_STEPS = 9
RECIPE = [
    "model.num_blocks=2", "model.d_model=16", "model.d_ffn=32", "model.sequence_length=32",
    f"model.vocab_size={VOCAB_SIZE}", f"train.num_steps={NUM_STEPS}", "train.global_batch_size=8",
    "train.micro_batch_size=2", "train.log_every_steps=1", "train.evaluate_every_steps=4",
    "train.num_evaluation_rows=10", "optimizer.warmup_steps=2", "optimizer.gradient_clipping=0.5",
    "checkpoint.save_every_steps=2",
]  # fmt: skip
CHANGING = [
    *RECIPE, "train.global_batch_size=[[0,8],[5,16]]", "data.masked_fraction=[[0,0.3],[5,0.15]]",
    "optimizer.schedule=stable", "optimizer.decay_steps=4",
]  # fmt: skip
SINGLE, FSDP2 = ["engine.kind=single"], ["engine.kind=fsdp2"]
ZERO1, ZERO2, ZERO3 = (["engine.kind=zero", f"engine.stage={stage}"] for stage in (1, 2, 3))


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


def run_in_turn(world_size: int, *recipes: list[str]) -> None:
    """Each of the runs to its end, one after the other, in processes of its own (DeepSpeed starts but once in one)."""
    for overrides in recipes:
        run_ranks(_pretrain, world_size, overrides)


def _pretrain(overrides: list[str]) -> None:
    pretrain(load_run_config(SMOKE, overrides))


def logged(run_folder: str | Path) -> list[dict]:
    """What the mathematics of the run decides, without speeds and memory, in the order of metrics.jsonl."""
    kept = ("step", "train/", "eval/", "data/")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in read_metrics(f"{run_folder}/metrics.jsonl")]


def events_of(run_folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run_folder / "tensorboard")).Reload()


def assert_close(found: list[dict], wanted: list[dict]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, rel=1e-5), row["step"]


def start(overrides: list[str], world_size: int = 1, signals: dict[int, int] | None = None) -> list[Script]:
    """The launcher's script on real processes; `signals` gives ranks the signal that each sends itself at step 4."""
    prepare = partial(_send_at_step_4, signals or {})
    arguments = ["--config", SMOKE, *overrides]
    return [
        Script("launch/pretrain.py", arguments, environment=variables, prepare=prepare)
        for variables in rank_variables(world_size)
    ]


def _send_at_step_4(signals: dict[int, int]) -> None:
    torch.set_num_threads(1)
    telling.OTHERS_TELL_AFTER_SECONDS = 0.0  # no launcher ends the others
    evaluate = Pretraining.evaluate

    def signalled(task, engine, world, step):
        if step == 4 and world.rank in signals:
            os.kill(os.getpid(), signals[world.rank])
        return evaluate(task, engine, world, step)

    Pretraining.evaluate = signalled


def finish(ranks: list[Script]) -> str:
    """What the first rank printed, once all ranks have left with exit code 0."""
    codes, *outputs = zip(*[rank.end() for rank in ranks], strict=True)
    assert codes == (0,) * len(ranks), outputs
    return "".join(printed[0] for printed in outputs)


@pytest.mark.parametrize("engine, world_size", [(SINGLE, 1), (FSDP2, 2), (ZERO1, 2), (ZERO3, 2)], ids=str)
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


@pytest.mark.parametrize("engine", [FSDP2, ZERO1, ZERO3], ids=str)
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
        f"data.shards={forty_rows}",
        f"output_dir={tmp_path}",
        "checkpoint.save_every_steps=1000",
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
        (rank,) = start([*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"])
        code, _, output = rank.end()
    assert code == 1
    assert f"process {os.getpid()} on host" in output and "Traceback" not in output
    trials("two jobs on one folder", 1)


def test_a_refused_start_leaves_no_folder(tmp_path):
    (rank,) = start([*RECIPE, *SINGLE, f"data.shards={tmp_path / 'nowhere'}", f"output_dir={tmp_path}"])
    code, _, output = rank.end()
    assert code == 2 and "no shards at" in output
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_another_is_not_resumed(forty_rows, tmp_path, trials):
    recipe = [*RECIPE, *SINGLE, f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, f"data.shards={forty_rows}", "train.stop_after_step=2"])
    write_tiny_shards(tmp_path / "other", [40], [12], sequence_length=32, seed=5)
    add_tokenizer(tmp_path / "other")
    changed = [*recipe, f"data.shards={tmp_path / 'other'}", "seed=7", "optimizer.peak_learning_rate=1e-3"]
    (rank,) = start(changed)
    code, _, output = rank.end()
    assert code == 2 and "Traceback" not in output
    assert "seed: the checkpoint was trained with 0; the run says 7" in output
    assert "optimizer.peak_learning_rate" in output and "data manifest_sha256" in output
    assert "3 mistakes" in output
    assert "old values and data; or, to go on with the new values, 'train.allow_changed_on_resume=[" in output
    allowed = ["train.allow_changed_on_resume=[optimizer.peak_learning_rate]", f"data.shards={forty_rows}", "seed=0"]
    output = finish(start([*changed, *allowed]))
    assert "optimizer.peak_learning_rate may differ" in output
    trials("other data, tokenizer, seed or model on resume", 3)


def _pretrain_by_clock(overrides: list[str], seconds_per_step: float) -> list[tuple[int, float]]:
    """By a clock that goes on by so much with each step, and on other ranks than the first ten times as fast."""

    def spent_seconds(budget: TimeBudget) -> float:
        budget.num_steps_timed = getattr(budget, "num_steps_timed", 0) + 1
        rank = int(os.environ.get("RANK", 0))
        return budget.spent_before + budget.num_steps_timed * seconds_per_step * (1 + 9 * rank)

    def noting_init(budget: TimeBudget, *configs, began: float, recorded: dict | None) -> None:
        init(budget, *configs, began=began, recorded=recorded)
        budget.spent_before = recorded["spent_seconds"] if recorded else 0.0

    init, TimeBudget.__init__, TimeBudget.spent_seconds = TimeBudget.__init__, noting_init, spent_seconds
    pretrain(load_run_config(SMOKE, overrides))


def test_the_decay_ends_with_the_time_budget_also_after_a_resume(forty_rows, tmp_path):
    budget = [
        "train.time_budget_seconds=11", "train.num_steps=40", "optimizer.schedule=stable", "optimizer.decay_steps=15",
        "checkpoint.save_every_steps=3", "checkpoint.keep_last=1",
    ]  # fmt: skip
    recipe = [*RECIPE, *budget, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_ranks(_pretrain_by_clock, 2, [*recipe, *FSDP2, "name=whole"], 1.0)
    whole = logged(tmp_path / "whole")
    assert [row["step"] for row in whole if "eval/loss" in row] == [4, 8, 11], "and the last one"
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert saved == [f"step_{step:09d}" for step in (8, 11)], "the one of the decision, and the newest"
    peak = load_run_config(SMOKE).optimizer.peak_learning_rate
    rates = [row["train/learning_rate"] / peak for row in whole if "train/loss" in row]
    assert rates == pytest.approx([0.5, *[1.0] * 8, 2 / 3, 1 / 3])
    checkpoint = read_run(tmp_path / "whole")
    decided = {"at_step": 8, "num_steps": 11, "decay_steps": 3}
    assert checkpoint.details["time_budget"] == {"spent_seconds": 11.0, "timed": [80, 10.0], "decided": decided}
    card = model_card(checkpoint.config, 1, checkpoint.head, None, checkpoint.details, Publication())
    assert "| steps | 11 of 11 |" in card
    assert is_finished(load_run_config(SMOKE, [*recipe, "name=whole"]))
    assert not is_finished(load_run_config(SMOKE, [*recipe, "name=another"]))
    # The same clock up to the decision, which step 8's checkpoint holds; then a slow one, which nobody looks at.
    for stop, seconds_per_step in ((5, 1.0), (9, 1.0), (40, 100.0)):
        run_ranks(_pretrain_by_clock, 1, [*recipe, *SINGLE, f"train.stop_after_step={stop}"], seconds_per_step)
    assert_close(logged(tmp_path / "smoke"), whole)
    assert read_run(tmp_path / "smoke").details["time_budget"]["decided"] == decided


def test_a_decay_that_the_recipe_begins_ends_with_the_time_too(forty_rows, tmp_path):
    """By the speed of its rows: the batch doubles there, so two steps fit into the four seconds that are left."""
    budget = [
        "train.time_budget_seconds=12", "train.num_steps=12", "optimizer.schedule=stable", "optimizer.decay_steps=4",
        "train.global_batch_size=[[0,8],[8,16]]", "train.evaluate_every_steps=5", "checkpoint.save_every_steps=5",
    ]  # fmt: skip
    recipe = [*RECIPE, *budget, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_ranks(_pretrain_by_clock, 1, recipe, 1.0)
    rates = [row["train/learning_rate"] for row in logged(tmp_path / "smoke") if "train/loss" in row]
    assert [rate / rates[1] for rate in rates[1:]] == pytest.approx([*[1.0] * 8, 0.5])
    decided = {"at_step": 8, "num_steps": 10, "decay_steps": 2}
    assert read_run(tmp_path / "smoke", 8).details["time_budget"]["decided"] == decided


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
    card = model_card(trained.config, 1, trained.head, None, trained.details, Publication())
    assert f"{forty_rows} (weight 2), " in card and "| manifest of other | sha256 " in card
    epochs = f"epochs of the run       1.00 of {forty_rows.name}, 0.67 of other"
    assert epochs in describe(load_run_config(SMOKE, joined), 2)


def test_what_a_run_leaves_behind(forty_rows, tmp_path):
    recipe = [*RECIPE, *SINGLE, "train.profile_steps=[4,6]", f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, "train.stop_after_step=5"], recipe)
    run_dir = tmp_path / "smoke"
    assert load_run_config(run_dir / "config.yaml") == load_run_config(SMOKE, recipe)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, NUM_STEPS + 1))
    assert [row["step"] for row in rows if "eval/loss" in row] == [4, 8, 9]
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == [f"step_{s:09d}" for s in (6, 8, 9)]

    events = events_of(run_dir)
    shown = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown.keys() == {key for row in rows for key in row} - {"step"}
    assert shown["train/loss"] == list(range(1, NUM_STEPS + 1)), "no step twice after a resume"
    profiles = sorted(path.name for path in (run_dir / "profile").iterdir())
    assert profiles == ["steps_4_to_5.trace.json.gz", "steps_6_to_6.trace.json.gz"]


def test_the_log_says_where_the_time_to_the_first_step_went(forty_rows, tmp_path):
    recipe = [*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}", "train.stop_after_step=2"]
    command = [sys.executable, "launch/pretrain.py", "--config", str(SMOKE), *recipe]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stderr
    lines = {line.split("  ")[2]: line.split("  ", 3)[-1].strip() for line in output.splitlines()[1:10]}
    assert lines["ranks"].startswith("1 on ") and lines["parameters"] == "17,982"
    assert lines["batch"] == "8 rows, 256 tokens; each rank 4 x 2 rows"
    stop = "this start stops after step 2"
    assert lines["steps"] == f"9, 2 of them warm-up; 1.8 epochs of 40 rows; {stop}"
    assert lines["data"] == f"{forty_rows}, 40 rows and 12 held out" and lines["output"] == f"{tmp_path}/smoke"
    assert lines["resuming"] == "nothing: a new run"
    assert re.search(r"INFO saving step_000000002\n", output)
    assert re.search(r"INFO saved step_000000002: [\d.]+kB in \d+\.\d s\n", output)
    assert output.count("start-up ") == 1
    total, parts = re.search(r"start-up ([\d.]+) s: (.*)", output).groups()
    seconds = {part: float(number) for part, number in re.findall(r"([a-z ]+) ([\d.]+)", parts)}
    wanted = ["imports", "process group", "data", "checkpoint", "model and engine", "metrics", "first step"]
    assert [part.strip() for part in seconds] == wanted
    assert float(total) == pytest.approx(sum(seconds.values()), abs=0.4)  # each is rounded to a tenth


def test_dry_run_imports_nothing_that_it_does_not_use():
    script = (
        "import sys; sys.argv = ['pretrain.py', '--config', 'configs/pretrain/gmlp_base.yaml', '--dry-run']\n"
        "from launch.pretrain import main; assert main() == 0\n"
        "print('imported', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.rsplit("imported ", 1)[1].split())
    assert "torch" in imported
    slow = {
        "deepspeed", "transformers", "datasets", "tensorboard", "triton", "matplotlib", "sentencepiece", "datatrove",
        "torch.utils.tensorboard", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor",
    }  # fmt: skip
    assert not slow & imported


def test_dry_run_starts_nothing(forty_rows, tmp_path):
    overrides = [*RECIPE, f"data.shards={forty_rows}", f"output_dir={tmp_path}", "--dry-run"]
    output = finish(start(overrides))
    assert "activations per rank" in output and "with train.recompute=none" in output
    assert "parameters" in output and "steps per epoch         5.0 (40 rows)" in output
    assert not list(tmp_path.iterdir())
    (rank,) = start([*overrides, "train.micro_batch_size=3", "seed=x"])
    code, _, output = rank.end()
    assert code == 2 and "seed: found 'x'" in output
