"""launch/science.py on tiny models: stopped, started again, and its page; and the sentences of each kind."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from gmlp_scale.models.layers import toeplitz
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.science.claims import (
    MODELS,
    PARTS,
    QUANTITIES,
    RATES,
    Quantity,
    Trained,
    holm,
    p_value,
    rates_of,
    slope,
    toeplitz_share,
)
from gmlp_scale.science.page import document, sentence
from gmlp_scale.science.runs import Table
from gmlp_scale.storage.run_folder import claimed
from gmlp_scale.tasks.pretraining import Pretraining
from tests.forked import ROOT, Script
from tests.written_shards import VOCAB_SIZE, add_tokenizer, write_tiny_shards

TINY = [
    "model.num_blocks=2", "model.d_model=8", "model.d_ffn=16", "model.sequence_length=16",
    f"model.vocab_size={VOCAB_SIZE}", "train.num_steps=4", "train.global_batch_size=4", "train.micro_batch_size=4",
    "train.precision=float32", "train.evaluate_every_steps=4", "optimizer.warmup_steps=1",
]  # fmt: skip
NUM_RUNS = len(PARTS["d"][1]) * (len(rates_of("d")) + 1)


def write_shards(folder: Path, num_rows: int) -> Path:
    write_tiny_shards(folder, [num_rows], [8], sequence_length=16)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("science") / "shards", 32)


def one_thread() -> None:
    torch.set_num_threads(1)


def stop_in_the_third_run() -> None:
    one_thread()
    started, open_loader = [], Pretraining.open_loader

    def signalled(task, world):
        started.append(task)
        if len(started) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return open_loader(task, world)

    Pretraining.open_loader = signalled


def start(output: Path, *arguments: object, prepare=one_thread) -> tuple[str, str]:
    """Part d with two seeds; what it printed, and its log."""
    options = ["--output", output, "--part", "d", "--seeds", 2, *arguments, *TINY]
    code, printed, errors = Script("launch/science.py", options, prepare=prepare).end()
    assert code == 0, errors
    return printed, errors


def done(output: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (output / "results").iterdir()}


def test_a_table_that_was_stopped_goes_on_and_does_nothing_twice(shards, tmp_path):
    output, places = tmp_path / "runs", ["--shards", shards]
    printed, _ = start(output, *places, "--dry-run")
    assert re.search(rf"^d +2 +{NUM_RUNS} ", printed, re.MULTILINE) and not output.exists()
    _, log = start(output, *places, prepare=stop_in_the_third_run)
    first = done(output)
    assert set(first) == {f"gmlp_rate_{rate:g}_seed_0" for rate in RATES[:2]} and "the same command resumes" in log
    _, log = start(output, *places)
    assert log.count("resuming from") == 1 and log.count("finished at step 4") == NUM_RUNS - 2
    every = done(output)
    assert len(every) == NUM_RUNS and first.items() <= every.items()
    printed, log = start(output, *places)
    assert re.search(r"^d +2 +0 ", printed, re.MULTILINE) and "finished" not in log and done(output) == every

    start(output, "--table", tmp_path / "science.md")
    text = (tmp_path / "science.md").read_text()
    for model in ("gmlp", "gmlp_dense"):
        losses = {name: json.loads(content)["loss"] for name, content in every.items() if name.startswith(f"{model}_r")}
        best = min((name for name in losses if name.endswith("seed_0")), key=losses.__getitem__)
        seeds = [losses[best], losses[best.replace("seed_0", "seed_1")]]
        shown = f"| {np.mean(seeds):.3f} ± {np.std(seeds, ddof=1):.3f} |"
        assert any(line.startswith(f"| {model} |") and shown in line for line in text.splitlines())
        assert "launch/pretrain.py --config compare_gmlp " in text and f"name={best}" in text
    shares = [json.loads(content).get("toeplitz_share", 0) for name, content in every.items() if "dense" in name]
    assert all(0 < share < 1 for share in shares)
    assert f"plot_model.py matrices --run outputs/science/{best} --blocks 0 5" in text  # of gmlp_dense

    shutil.copytree(output / "results", tmp_path / "copied/results")
    without_a_field = tmp_path / f"copied/results/{best}.json"  # as if the field were newer than the result
    without_a_field.write_text(without_a_field.read_text().replace('"log_filters": false,', ""))
    start(tmp_path / "copied", "--table", tmp_path / "copied.md")
    assert (tmp_path / "copied.md").read_text() == text

    others = write_shards(tmp_path / "others", 40)
    options = ["--output", output, "--part", "d", "--dry-run", "--shards", others, *TINY, "train.precision=bf16"]
    code, _, errors = Script("launch/science.py", options).end()
    assert code == 2 and "2 mistakes" in errors and "precision: found bf16; the runs there have float32" in errors

    options = ["--output", output, "--part", "d", "--table", tmp_path / "other.md", *TINY, "train.num_steps=8"]
    code, _, errors = Script("launch/science.py", options).end()
    assert code == 2 and "train.num_steps: the checkpoint was trained with 4; the run says 8" in errors

    changed = output / f"results/gmlp_rate_{RATES[0]:g}_seed_0.json"
    changed.write_text(changed.read_text().replace('"precision": "float32"', '"precision": "bf16"'))
    code, _, errors = Script("launch/science.py", [*options, "train.num_steps=4"]).end()
    assert code == 2 and "2 mistakes" in errors and "needed are runs on one text in one precision" in errors


def test_runs_that_another_process_holds_or_that_diverge_stop_no_other(shards, tmp_path):
    first = f"gmlp_rate_{RATES[1]:g}_seed_0"  # so gmlp has no rate
    with claimed(tmp_path / first):
        _, log = start(tmp_path, "--shards", shards, "optimizer.weight_decay=1e30")
    assert f"{first} is in use by" in log and log.count("counts as infinitely bad") == len(done(tmp_path)) > 4
    assert first not in done(tmp_path)
    start(tmp_path, "--table", tmp_path / "science.md", "optimizer.weight_decay=1e30")
    assert "inf, not run, inf | 0 of 2 seeds" in (tmp_path / "science.md").read_text()


def test_overrides_that_would_make_different_models_alike_are_refused():
    Table("x", ("d",), 3, ("model.num_blocks=36",))
    with pytest.raises(ConfigError, match=r"model.num_blocks=36: the runs of these parts differ in it"):
        Table("x", ("c", "d"), 3, ("model.num_blocks=36",))
    for override in ("seed=1", "optimizer={peak_learning_rate: 1.0e-3}"):
        with pytest.raises(ConfigError, match="the runs of these parts differ in it"):
            Table("x", ("d",), 3, (override,))


CLAIM = Quantity("b", "Loss of x - loss of y", ("y", "x"), lambda y, x: x.loss - y.loss, "y beats x")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            [0.5, 0.51, 0.52],
            "- **Holds**: y beats x. Loss of x - loss of y: 0.510 ± 0.010 (p = 0.00013, by Holm 0.04).",
        ),
        (
            [-0.5, -0.51, -0.52],
            "- **Does not hold**: y beats x. Loss of x - loss of y: -0.510 ± 0.010 (p = 0.00013, by Holm 0.04).",
        ),
        (
            [0.5, -0.2, 0.1],
            "- **Undecided**: y beats x. Loss of x - loss of y: 0.133 ± 0.351 (p = 0.58, by Holm 0.04).",
        ),
        ([0.5, np.inf, 0.5], "- **Undecided**: y beats x. Loss of x - loss of y: inf (a loss was not finite)."),
        ([0.5, 0.51], "- **Not run**: y beats x. Loss of x - loss of y: 0.505 ± 0.007 (done: y 2 of 3)."),
        ([], "- **Not run**: y beats x. Loss of x - loss of y (done: y 2 of 3)."),
    ],
)
def test_sentences(values, expected):
    assert sentence(CLAIM, values, "y 2 of 3", num_seeds=3, corrected_p=0.04) == expected


def test_a_claim_that_does_not_survive_the_correction_says_so():
    found = sentence(CLAIM, [-0.5, -0.51, -0.52], "", num_seeds=3, corrected_p=0.06)
    assert found.startswith("- **Does not hold**: y beats x.")
    assert found.endswith("(p = 0.00013, by Holm 0.06, undecided after the correction).")


def test_holms_correction_by_hand():
    # By size: 4 x 0.01, 3 x 0.02, then 2 x 0.02 = 0.04 and 1 x 0.9, each at least the one before.
    assert holm([0.02, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.5, 0.4]) == pytest.approx([0.8, 0.8]) and holm([]) == []


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 31])
def test_p_values_are_scipys(number):
    values = np.random.default_rng(number).normal(0.7, 1, number)
    assert p_value(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)
    assert (p_value([1.0]), p_value([0.0, 0.0]), p_value([1.0, 1.0])) == (1.0, 1.0, 0.0)


def test_the_toeplitz_share_of_a_matrix():
    offsets, noise = torch.randn(2 * 64 - 1), torch.randn(64, 64)
    assert toeplitz_share(toeplitz(offsets).numpy()) == pytest.approx(1.0)
    assert toeplitz_share(noise.numpy()) == pytest.approx((2 * 64 - 1) / 64**2, rel=0.5)


def test_a_slope_is_the_change_per_doubling():
    assert slope(*(Trained(5 - 0.3 * power, 2**power) for power in (20, 21, 23))) == pytest.approx(-0.3)


def test_models_are_of_one_size_but_for_the_depths_and_every_part_s_quantities_are_of_its_models():
    table = Table("x", tuple(PARTS), 3, ())
    assert set(table.models) == set(MODELS)
    for model in (*PARTS["b"][1], *PARTS["a"][1], *PARTS["e"][1]):
        assert 1.6e6 < table.num_parameters(model) < 2.2e6, model
    for model in PARTS["a"][1]:
        assert table.num_parameters(model) == pytest.approx(table.num_parameters("gmlp"), rel=0.001)
    for quantity in QUANTITIES:
        assert set(quantity.models) <= set(PARTS[quantity.part][1])
    tokens = {run.name: run.tokens_per_step.before(run.train.num_steps) for run in table.runs()}
    assert set(tokens.values()) == {16_384_000, 40_001_536}
    large = {model for model in MODELS if tokens[f"{model}_rate_{RATES[1]:g}_seed_0"] > 16_384_000}
    assert large == set(PARTS["g"][1])
    assert all(table.num_parameters(model) == pytest.approx(5.67e6, rel=0.02) for model in large)


def test_the_page_in_docs_is_written_from_the_results_beside_it():
    written = (ROOT / "docs/science.md").read_text()
    assert document(Table(f"{ROOT}/docs/science", tuple(PARTS), 3, ())) == written
