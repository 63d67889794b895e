"""The table of launch/plan.py: which layouts fit, in which order, and what their times rest on."""

from dataclasses import replace
from pathlib import Path

import pytest

from gmlp_scale.plan.describe import describe
from gmlp_scale.plan.layouts import GPUS, HOST_TIMES, Assumptions, describe_fit, layouts, table
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from launch import plan

RECIPES = Path(__file__).parents[2] / "configs" / "pretrain"
XLARGE = load_run_config(RECIPES / "gmlp_xlarge.yaml")
COMMAND = ["plan.py", "--config", str(RECIPES / "gmlp_xlarge.yaml"), "--gpus", "64", "--gpu", "h200"]


def test_layouts_that_fit_come_first_and_the_fastest_of_them():
    small_gpu = replace(GPUS["rtx3090"], memory_gb=12)
    found = layouts(XLARGE, Assumptions(small_gpu, num_gpus=8, num_nodes=1))
    fitting = [layout for layout in found if layout.micro_batch_size]
    assert 0 < len(fitting) < len(found) and found[: len(fitting)] == fitting
    assert [layout.step_seconds for layout in fitting] == sorted(layout.step_seconds for layout in fitting)
    for layout in fitting:
        assert sum(layout.memory.values()) <= 0.95 * 12e9 and 32 % layout.micro_batch_size == 0
    assert all(sum(layout.memory.values()) > 0.95 * 12e9 for layout in found[len(fitting) :])


def test_times_follow_from_what_is_assumed():
    one = Assumptions(GPUS["h100"], num_gpus=1, num_nodes=1, fraction_of_peak=0.5)
    alone = {layout.name: layout for layout in layouts(XLARGE, one)}
    flops = 6.371e9 * 256 * 512  # docs/recipes.md's training FLOPs per token
    assert alone["single"].step_seconds == pytest.approx(flops / (0.5 * 989e12), rel=1e-3)
    assert not any(layout.communication_seconds for layout in alone.values())

    many = Assumptions(GPUS["h100"], num_gpus=16, num_nodes=4, fraction_of_peak=0.5)
    found = {layout.name: layout for layout in layouts(XLARGE, many)}
    assert "single" not in found
    # 4 cards of 50 GB/s between nodes are slower than NVLink's 450; 940.6 M parameters at 10 bytes on the wire
    assert found["zero, stage 1"].communication_seconds == pytest.approx(
        940.6e6 * 10 * 15 / 16 / (0.8 * 4 * 50e9), rel=0.01
    )
    assert found["zero, stage 1"].step_seconds > alone["single"].step_seconds / 16
    assert found["fsdp2"].compute_seconds == pytest.approx(alone["single"].step_seconds / 16)


def test_no_step_is_shorter_than_its_host_takes_to_start_it():
    """At 8 rows a rank, of which two fit at once, a GPU computes 144 blocks in less time than a host starts them."""
    small_gpu = replace(GPUS["h100"], memory_gb=16)
    found = {layout.name: layout for layout in layouts(XLARGE, Assumptions(small_gpu, num_gpus=32, num_nodes=4))}
    fsdp2, time = found["fsdp2"], HOST_TIMES["fsdp2"]
    assert fsdp2.micro_batch_size == 2
    assert fsdp2.host_seconds == pytest.approx(144 * (4 * time.compiled + time.update) / 1000)
    assert fsdp2.step_seconds == fsdp2.host_seconds > max(fsdp2.compute_seconds, fsdp2.communication_seconds)
    for compile, of_micro_batch in ((False, time.eager), ("reduce-overhead", time.graphs)):
        others = layouts(XLARGE.with_train(compile=compile), Assumptions(small_gpu, num_gpus=32, num_nodes=4))
        seconds = {layout.name: layout.host_seconds for layout in others}["fsdp2"]
        assert seconds == pytest.approx(144 * (4 * of_micro_batch + time.update) / 1000)


def test_the_largest_recipe_has_the_micro_batch_that_one_node_needs():
    """It is the largest that fits, and by the plan the host then takes less time than the GPU."""
    found = {layout.name: layout for layout in layouts(XLARGE, Assumptions(GPUS["h100"], num_gpus=8, num_nodes=1))}
    assert found["fsdp2"].micro_batch_size == XLARGE.train.micro_batch_size
    assert found["fsdp2"].host_seconds < found["fsdp2"].compute_seconds


def test_the_table_says_what_it_rests_on(capsys, monkeypatch):
    text = table(XLARGE, Assumptions(GPUS["h200"], num_gpus=64, num_nodes=8))
    for stated in ("0.40 of 989 TFLOP/s (bf16)", "0.95 of 141 GB", "320 GB/s", "computed, not measured"):
        assert stated in text
    assert "checkpoints 11.29 GB each, 3 kept" in text and "data 262.1 GB" in text

    every = XLARGE.checkpoint.model_copy(update={"keep_every_steps": 100_000})
    kept = XLARGE.model_copy(update={"checkpoint": every})
    assert "3 and at the end 10 more kept" in table(kept, Assumptions(GPUS["h200"], num_gpus=64, num_nodes=8))

    monkeypatch.setattr("sys.argv", [*COMMAND, "--nodes", "8", "train.precision=auto"])
    assert plan.main() == 0 and capsys.readouterr().out.strip() == text


def test_a_growing_batch_takes_the_time_of_all_its_steps():
    h100 = Assumptions(GPUS["h100"], num_gpus=1, num_nodes=1)
    full, grown = (
        load_run_config(RECIPES / "smoke.yaml", [f"train.global_batch_size={batch}", "train.micro_batch_size=4"])
        for batch in ("8", "[[0,4],[5,8]]")
    )
    of_full, of_grown = (layouts(run, h100)[0] for run in (full, grown))
    assert of_grown.compute_seconds == pytest.approx(of_full.compute_seconds * (5 * 0.5 + 15) / 20)
    assert (of_full.micro_batch_size, of_grown.micro_batch_size) == (8, 4)
    text = describe(grown, 1)
    assert "tokens per step         256, then 512 from step 5" in text
    assert "1, then 2 from step 5 micro-batches of 4 rows" in text
    assert f"tokens in all           {5 * 256 + 15 * 512:,}" in text


@pytest.mark.parametrize(
    "option, needed",
    [
        (["--fraction-of-peak", "0"], "--fraction-of-peak: found 0; needed: greater than 0"),
        (["--fraction-of-link", "40"], "--fraction-of-link: found 40; needed: less than or equal to 1"),
        (["--fake-ranks", "-1"], "--fake-ranks: found -1; needed: greater than or equal to 1"),
        (["--nodes", "3"], "--gpus 64 is no multiple of --nodes 3"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(option, needed, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [*COMMAND, *option])
    with pytest.raises(SystemExit) as left:
        plan.main()
    assert left.value.code == 2 and needed in capsys.readouterr().err


def test_ranks_must_divide_the_global_batch():
    with pytest.raises(ConfigError, match=r"train.global_batch_size: found 256; must be a multiple .* GPUs, 512"):
        layouts(XLARGE, Assumptions(GPUS["h200"], num_gpus=512, num_nodes=64))


def test_a_dry_run_says_whether_the_recipe_fits_and_what_would():
    of_fsdp2 = next(one for one in layouts(XLARGE, Assumptions(GPUS["h100"], 8, 1)) if one.name == "fsdp2")
    most = of_fsdp2.micro_batch_size
    run = load_run_config(RECIPES / "gmlp_xlarge.yaml", [f"train.micro_batch_size={most}"])
    takes = sum(of_fsdp2.memory.values()) / 1e9
    assert f"the recipe's {most} rows take {takes:.1f} GB, which fits; at most {most} rows" in describe_fit(run, 8, 80)
    assert "which does not fit; not even a micro-batch of one row fits" in describe_fit(run, 8, 4)
    found = describe_fit(load_run_config(RECIPES / "gmlp_xlarge.yaml", ["train.micro_batch_size=auto"]), 8, 80)
    assert f"GPUs of 80 GB           at most {most} rows fit in a micro-batch" in found
