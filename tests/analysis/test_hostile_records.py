"""Records of runs that are damaged or made to do harm: launch/report.py and launch/plot_metrics.py end with a page or
one message, and never hang."""

import json
import os
import shutil

import pytest

from launch import plot_metrics, report

YAML_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD_CONFIGS = {
    "bomb": (YAML_BOMB, "an alias"),
    "recursive": ("a: &a [*a]\n", "an alias"),
    "date": ("a: 2024-13-45\n", "month must be in 1..12"),
    "deep": (f"a: {'[' * 100_000}\n", "maximum recursion depth"),
    "nested": (f"a: {'[' * 120}{']' * 120}\n", "it has more than 100 levels"),
    "surrogate": ('a: "\\ud800"\n', "surrogates not allowed"),
    "digits": (f"a: {'9' * 400}\n", "int too large"),
    "tag": ("a: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
    "list": ("- 1\n", "found list"),
}
BAD_LINES = {
    "integer": f'{{"step": 1, "train/loss": {"9" * 400}}}',
    "step": f'{{"step": {"9" * 5000}}}',
    "deep": f'{{"step": 1, "why": {"[" * 100_000}}}',
    "surrogate": '{"step": 1, "\\ud800": 1}',
    "text": '{"step": 1, "train/loss": "low"}',
    "list": "[1]",
}


@pytest.fixture
def run_dir(tmp_path):
    """A run with a config, and ten steps whose values are as large or small as floats are."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: run\nmodel: {kind: [gmlp]}\ntrain: {num_steps: many}\na: 2024-01-01\n")
    values = [1e308, -1e308, 5e-324, -5e-324, 1e-200, 1e200, float("nan"), float("inf"), 0.0, 3.0]
    tags = ("train/loss", "train/perplexity", "perf/tokens_per_second", "perf/step_seconds", "eval/perplexity")
    lines = [{"step": step, **dict.fromkeys(tags, value)} for step, value in enumerate([*values, *values[:2]], 1)]
    lines.append({"step": 2**63 - 1, "train/loss": 10**300, "note": "text", "other": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "skipped_steps.jsonl").write_text('{"step": 9, "why": {"a": ["<b>"]}}\n')
    return folder


def test_values_of_any_size_are_drawn_or_counted_as_left_out(run_dir, tmp_path, succeeds, trials):
    succeeds(report.main, run_dir, "--output", tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    assert "Not shown: 11 values that are not finite, not positive, too large or too small." in text
    assert "Not shown: 10 values that are not finite, too large or too small." in text, "0 is shown on a linear axis"
    for tag in ("train/loss", "train/perplexity", "perf/step_seconds"):
        succeeds(plot_metrics.main, "--runs", run_dir, "--tag", tag, "--output", tmp_path / "a.png")
    trials("YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9", 4)


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_is_not_plain_is_refused(name, run_dir, tmp_path, refuses, trials):
    content, found = BAD_CONFIGS[name]
    (run_dir / "config.yaml").write_text(content)
    assert found in refuses(f"{run_dir}/config.yaml", report.main, run_dir, "--output", tmp_path / "a.html")
    trials("YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9", 1)


@pytest.mark.parametrize("file", ["metrics.jsonl", "skipped_steps.jsonl"])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_is_no_record_is_named(name, file, run_dir, tmp_path, refuses, trials):
    (run_dir / file).write_text('{"step": 1}\n' + BAD_LINES[name] + "\n")
    refuses(f"{run_dir}/{file}: line 2", report.main, run_dir, "--output", tmp_path / "a.html")
    if file == "metrics.jsonl":
        refuses(f"{run_dir}/{file}: line 2", plot_metrics.main, "--runs", run_dir, "--output", tmp_path / "a.png")
    trials("YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9", 1)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
@pytest.mark.parametrize("file", ["config.yaml", "metrics.jsonl", "skipped_steps.jsonl"])
def test_a_pipe_or_device_is_refused(file, make, run_dir, tmp_path, refuses, trials):
    (run_dir / file).unlink()
    make(run_dir / file)
    refuses(f"{run_dir}/{file}", report.main, run_dir, "--output", tmp_path / "a.html")
    trials("a pipe or device where a file of a run is read", 1)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_pipe_or_device_is_left_out_where_the_rest_says_enough(make, runs, tmp_path, succeeds, trials):
    run_dir = shutil.copytree(runs / "gmlp", tmp_path / "run")
    done = run_dir / "checkpoints" / "step_000000004" / "DONE"
    done.unlink()
    make(done)
    make(run_dir / "tensorboard" / "events.out.tfevents.9")
    succeeds(report.main, run_dir, "--output", tmp_path / "a.html")
    assert "step 2</td>" in (tmp_path / "a.html").read_text(), "the newest checkpoint"
    trials("a pipe or device where a file of a run is read", 2)
