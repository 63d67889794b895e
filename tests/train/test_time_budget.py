"""What is decided when the time for the decay has come, and whole runs with a budget."""

import os

import pytest

from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.engine import TrainConfig
from gmlp_scale.engine.optimizer import AdamwConfig, learning_rate
from gmlp_scale.export.card import Publication, model_card
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.step_reports import StepReport
from gmlp_scale.train.time_budget import TimeBudget
from launch.elastic import is_finished
from tests.gloo_ranks import run_ranks
from tests.whole_runs import FSDP2, RECIPE, SINGLE, SMOKE, assert_close, logged

OPTIMIZER = AdamwConfig(schedule="stable", warmup_steps=10, decay_steps=100)  # a tenth of the 1000 steps


def budget_of(seconds: float | None = 200.0, recorded: dict | None = None, **changes) -> TimeBudget:
    fields = {"num_steps": 1000, "global_batch_size": 8, "micro_batch_size": 8, "time_budget_seconds": seconds}
    return TimeBudget(TrainConfig(**(fields | changes)), OPTIMIZER, began=0.0, recorded=recorded)


def see(budget: TimeBudget, spent_seconds: dict[int, float]) -> TimeBudget:
    """Reports of the steps, with the seconds spent when each was done."""
    for step, seconds in spent_seconds.items():
        budget.see(StepReport(step, 1.0, 1.0, 1e-4, 1.0, spent_seconds=seconds))
    return budget


def test_the_decay_fills_the_rest_of_the_time_by_the_speed_so_far():
    budget = see(
        budget_of(), {1: 60.0, 238: 60.0 + 237 * 0.5}
    )  # the first step took a minute, each other half a second
    assert not budget.is_decay_due
    assert see(budget, {243: 60.0 + 242 * 0.5}).is_decay_due  # 181 s, of which nine tenths of 200 are past
    config, optimizer = budget.decide()
    assert (config.num_steps, optimizer.decay_steps) == (243 + 38, 38), "19 seconds of half a second each"
    assert (config.last_step, budget.is_decay_due) == (281, False)
    rates = [learning_rate(optimizer, step, config.num_steps) / OPTIMIZER.peak_learning_rate for step in range(10, 281)]
    assert rates[:234] == [1.0] * 234 and rates[-2:] == pytest.approx([2 / 38, 1 / 38])


def test_a_growing_batch_is_timed_by_its_rows():
    budget = see(budget_of(global_batch_size=[(0, 8), (240, 16), (250, 32)]), {1: 0.5, 241: 181.0})
    seconds_per_row = (181 - 0.5) / (239 * 8 + 16)
    rows_left = 19 / seconds_per_row
    config, _ = budget.decide()
    assert config.num_steps == 250 + (rows_left - 9 * 16) // 32


def test_a_resume_repeats_the_decision_and_counts_the_time_before():
    first = see(budget_of(), {1: 1.0, 150: 90.0})
    spent_before = first.record()["time_budget"]
    assert spent_before == {"spent_seconds": 90.0, "timed": (149 * 8, 89.0), "decided": None}
    resumed = budget_of(recorded=spent_before)
    assert resumed.spent_seconds() - budget_of().spent_seconds() == pytest.approx(90.0, abs=10.0)
    decided = see(resumed, {151: 91.0, 241: 181.0}).decide()
    again = budget_of(recorded=resumed.record()["time_budget"])
    assert (again.config, again.optimizer) == decided and again.decided_at == 241
    assert decided[0].num_steps == 266, "19 seconds at the speed of both starts, 239 steps in 179 seconds"
    assert not see(again, {242: 500.0, 243: 1000.0}).is_decay_due


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
    budget = see(budget_of(), spent)
    assert budget.is_decay_due and budget.decide()[0].num_steps == num_steps


def test_a_decay_within_the_warm_up_falls_to_0_and_is_told(caplog):
    budget = see(budget_of(), {1: 1.0, 5: 300.0})
    config, optimizer = budget.decide()
    assert "within the warm-up of 10 steps" in caplog.text
    assert learning_rate(optimizer, config.num_steps, config.num_steps) == 0.0
    assert learning_rate(optimizer, 3, 1000) == OPTIMIZER.peak_learning_rate * 4 / 10


def test_a_change_that_never_comes_is_told(caplog):
    see(budget_of(global_batch_size=[(0, 8), (900, 16)]), {1: 1.0, 150: 190.0}).decide()
    assert "train.global_batch_size changes at step 900, which never comes" in caplog.text


def test_the_recipes_own_decay_ends_with_the_time_too():
    """The batch grows fourfold as it begins, before nine tenths of the time are past."""
    budget = see(budget_of(1000.0, global_batch_size=[(0, 8), (900, 32)]), {1: 0.9, 899: 899.0})
    assert not budget.is_decay_due and [step for step in range(1, 1001) if budget.must_know(step)] == [900]
    assert see(budget, {900: 899.9}).is_decay_due
    config, optimizer = budget.decide()
    assert (config.num_steps, optimizer.decay_steps) == (925, 25), "100 seconds of 4 seconds each"


def test_a_recipe_that_fits_its_budget_is_left_alone():
    budget = see(budget_of(), {1: 0.1, 900: 179.0})  # 100 steps of a fifth of a second are left, and 21 seconds
    assert not budget.is_decay_due
    assert not see(budget, {901: 1e9}).is_decay_due, "once it has begun, the decay stays as it is"


def test_the_speed_of_the_starts_before_is_enough_to_decide():
    recorded = {"spent_seconds": 250.0, "timed": (898 * 8, 250.0), "decided": None}
    budget = see(budget_of(280.0, recorded), {900: 255.0})
    assert budget.is_decay_due and budget.decide()[0].num_steps == 989, "100 steps would take 28 seconds; 25 are left"


def test_nothing_is_decided_without_a_budget_or_within_the_recipes_own_decay():
    assert not see(budget_of(None), {1: 1.0, 2: 1e9}).is_decay_due and not budget_of(None).record()
    assert not see(budget_of(), {1: 1.0, 900: 180.0}).is_decay_due
    assert not see(budget_of(), {1: 190.0}).is_decay_due, "one step, which compiles, tells no speed"


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
