"""launch/pretrain.py: what a run leaves behind and says of itself, and the dry run."""

import json
import re
import subprocess
import sys

import pytest

from gmlp_scale.recipe.reader import load_run_config
from tests.whole_runs import NUM_STEPS, RECIPE, ROOT, SINGLE, SMOKE, events_of, finish, refused, run_in_turn, start


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


def test_dry_run_refuses_what_the_run_refuses(forty_rows, tmp_path):
    recipe = [*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={tmp_path}"]
    run_in_turn(1, [*recipe, "train.stop_after_step=2"])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    folder = tmp_path / "smoke"
    assert f"would resume from       {folder}/checkpoints/step_000000002" in finish(start([*recipe, "--dry-run"]))
    branch = ["name=branch", f"branch_from={folder}@2"]
    assert f"would resume from       {folder}@2" in finish(start([*recipe, *branch, "--dry-run"]))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    for changed in (["model.d_model=8", "train.num_steps=12"], [*branch, "seed=3"]):
        ends = [start([*recipe, *changed, *dry])[0].end() for dry in ([], ["--dry-run"])]
        assert ends[0] == ends[1]
        code, printed, message = ends[1]
        assert code == 2 and not printed and "belongs to another run" in message


def test_dry_run_starts_nothing(forty_rows, tmp_path):
    overrides = [*RECIPE, f"data.shards={forty_rows}", f"output_dir={tmp_path}", "--dry-run"]
    output = finish(start(overrides))
    assert "activations per rank" in output and "with train.recompute=none" in output
    assert "parameters" in output and "steps per epoch         5.0 (40 rows)" in output
    assert not list(tmp_path.iterdir())
    assert "seed: found 'x'" in refused([*overrides, "train.micro_batch_size=3", "seed=x"])
