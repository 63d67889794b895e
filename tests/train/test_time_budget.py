"""What is decided when the time for the decay has come, and whole runs with a budget."""

import os

import pytest

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.engine import TrainConfig
from gmlp_scale.engine.optimizer import AdamwConfig
from gmlp_scale.export.card import Publication, model_card
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.schedule import Schedule
from gmlp_scale.train.step_reports import StepReport, StepReports
from gmlp_scale.train.time_budget import build_schedule
from launch.elastic import is_finished
from tests.gloo_ranks import run_ranks
from tests.whole_runs import FSDP2, RECIPE, SINGLE, SMOKE, assert_close, logged

OPTIMIZER = AdamwConfig(schedule="stable", warmup_steps=10, decay_steps=100)  # a tenth of the 1000 steps


def schedule_of(seconds: float | None = 200.0, recorded: dict | None = None, **changes) -> Schedule:
    fields = {"num_steps": 1000, "global_batch_size": 8, "micro_batch_size": 8, "time_budget_seconds": seconds}
    return build_schedule(TrainConfig(**(fields | changes)), OPTIMIZER, {"time_budget": recorded})


def see(schedule: Schedule, spent_seconds: dict[int, float]) -> Schedule:
    """Reports of the steps, with the seconds spent when each was done."""
    for step, seconds in spent_seconds.items():
        schedule.see(StepReport(step, 1.0, 1.0, 1e-4, spent_seconds=seconds))
    return schedule


def test_the_decay_fills_the_rest_of_the_time_by_the_speed_so_far():
    # The first step took a minute, each other half a second.
    schedule = see(schedule_of(), {1: 60.0, 238: 60.0 + 237 * 0.5})
    assert not schedule.may_decide(239) and not schedule.decide()
    assert see(schedule, {243: 60.0 + 242 * 0.5}).decide()  # 181 s, of which nine tenths of 200 are past
    assert (schedule.num_steps, schedule.last_step) == (243 + 38, 281), "19 seconds of half a second each"
    assert not schedule.decide(), "it is decided once"
    rates = [schedule.rate(step) / OPTIMIZER.peak_learning_rate for step in range(10, 281)]
    assert rates[:234] == [1.0] * 234 and rates[-2:] == pytest.approx([2 / 38, 1 / 38])


def test_a_growing_batch_is_timed_by_its_rows():
    schedule = see(schedule_of(global_batch_size=[(0, 8), (240, 16), (250, 32)]), {1: 0.5, 241: 181.0})
    seconds_per_row = (181 - 0.5) / (239 * 8 + 16)
    rows_left = 19 / seconds_per_row
    assert schedule.decide() and schedule.num_steps == 250 + (rows_left - 9 * 16) // 32


def test_a_resume_repeats_the_decision_and_counts_the_time_before():
    first = see(schedule_of(), {1: 1.0, 150: 90.0})
    assert first.state() == {"spent_seconds": 90.0, "timed": (149 * 8, 89.0), "decided": None}
    resumed = see(schedule_of(recorded=first.state()), {151: 1.0, 241: 91.0})
    assert resumed.state()["spent_seconds"] == 181.0 and resumed.decide()
    assert resumed.num_steps == 266, "19 seconds at the speed of both starts, 239 steps in 179 seconds"
    again = schedule_of(recorded=resumed.state())
    assert (again.num_steps, again.rate(250), again.decided_at) == (266, resumed.rate(250), 241)
    assert not see(again, {242: 500.0, 243: 1000.0}).decide()


@pytest.mark.parametrize(
    "spent, num_steps",
    [
        ({1: 1.0, 5: 300.0}, 6),  # the time was over before anyone looked
        ({1: 1.0, 850: 180.0}, 944),
        ({1: 1.0, 899: 180.0}, 999),
        ({1: 0.0, 898: 180.0, 899: 180.1}, 998),
        ({1: 179.9, 899: 180.0}, 1000),  # so fast of late that all steps of the recipe fit
    ],
)
def test_a_run_never_ends_at_once_nor_after_the_recipes_last_step(spent, num_steps):
    schedule = see(schedule_of(), spent)
    assert schedule.decide() and schedule.num_steps == num_steps


def test_a_decay_within_the_warm_up_falls_to_0_and_is_logged(caplog):
    schedule = see(schedule_of(), {1: 1.0, 5: 300.0})
    rate_before = schedule.rate(3)
    assert schedule.decide() and "within the warm-up of 10 steps" in caplog.text
    assert schedule.rate(schedule.num_steps) == 0.0
    assert rate_before == OPTIMIZER.peak_learning_rate * 4 / 10


def test_a_change_that_never_comes_is_logged(caplog):
    see(schedule_of(global_batch_size=[(0, 8), (900, 16)]), {1: 1.0, 150: 190.0}).decide()
    assert "train.global_batch_size changes at step 900, which never comes" in caplog.text


def test_the_recipes_own_decay_ends_with_the_time_too():
    """The batch grows fourfold as it begins, before nine tenths of the time are past."""
    schedule = see(schedule_of(1000.0, global_batch_size=[(0, 8), (900, 32)]), {1: 0.9, 899: 899.0})
    assert not schedule.decide() and [step for step in range(1, 1001) if schedule.may_decide(step)] == [900]
    assert see(schedule, {900: 899.9}).decide()
    assert schedule.num_steps == 925, "100 seconds of 4 seconds each"
    assert schedule.rate(900) == OPTIMIZER.peak_learning_rate > schedule.rate(901)


def test_a_recipe_that_fits_its_budget_is_left_alone():
    schedule = see(schedule_of(), {1: 0.1, 900: 179.0})  # 100 steps of a fifth of a second are left, and 21 seconds
    assert not schedule.decide()
    assert not see(schedule, {901: 1e9}).decide(), "once it has begun, the decay stays as it is"


def test_the_speed_of_the_starts_before_is_enough_to_decide():
    recorded = {"spent_seconds": 250.0, "timed": (898 * 8, 250.0), "decided": None}
    schedule = see(schedule_of(280.0, recorded), {900: 5.0})
    assert schedule.decide() and schedule.num_steps == 989, "100 steps would take 28 seconds; 25 are left"


def test_nothing_is_decided_without_a_budget_or_within_the_recipes_own_decay():
    assert not see(schedule_of(None), {1: 1.0, 2: 1e9}).decide() and schedule_of(None).state() is None
    assert not see(schedule_of(), {1: 1.0, 900: 180.0}).decide()
    assert not see(schedule_of(), {1: 190.0}).decide(), "one step, which compiles, says nothing of the speed"


def _pretrain_by_clock(overrides: list[str], seconds_per_step: float) -> list[tuple[int, float]]:
    """By a clock that goes on by so much with each step, and on other ranks than the first ten times as fast."""

    def spent_seconds(reports: StepReports) -> float:
        reports.num_steps_timed = getattr(reports, "num_steps_timed", 0) + 1
        return reports.num_steps_timed * seconds_per_step * (1 + 9 * int(os.environ.get("RANK", 0)))

    StepReports.spent_seconds = spent_seconds
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
    card = model_card(checkpoint, Publication())
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
