"""launch/doctor.py says what a run would fail from. Each fault is real, and is found by the check that it is for."""

import contextlib
import io
import os
import resource
import sys
import tempfile
from pathlib import Path

import pytest

from gmlp_scale.distributed.world import start_world
from gmlp_scale.doctor import checkup, measurements
from gmlp_scale.doctor.checkup import Checkup
from gmlp_scale.engine import Fsdp2Engine, collective_check
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.storage.files import list_files
from gmlp_scale.storage.run_folder import claimed
from launch.doctor import main
from tests.checkpoint.fake_engine import save_steps
from tests.gloo_ranks import run_ranks
from tests.whole_runs import RECIPE, SMOKE
from tests.written_shards import write_tiny_shards

CHECKS = ["machines", "collectives", "room", "writing", "ranks", "shards", "run folder", "gradients", "steps", "loader"]


@pytest.fixture
def small(monkeypatch):
    hurry(monkeypatch.setattr)


@pytest.fixture
def untrained(small, monkeypatch):
    """Without the training, where it is not what the fault is about."""
    for name in ("self_test", "try_recipe"):
        monkeypatch.setattr(measurements, name, lambda run, world: (1.0, "not tried"))


def hurry(set_value) -> None:
    set_value(measurements, "WRITTEN_BYTES", 2**20)
    set_value(measurements, "UPLOADED_BYTES", 2**10)
    set_value(measurements, "LOADING_SECONDS", 0.01)
    set_value(checkup, "SIZES_BYTES", {"cpu": (2**10, 2**14)})


@pytest.fixture
def recipe(tmp_path) -> list[str]:
    write_tiny_shards(tmp_path / "shards", [17, 23], [12], sequence_length=32)
    return [*RECIPE, "engine.kind=single", f"data.shards={tmp_path / 'shards'}", f"output_dir={tmp_path / 'a' / 'b'}"]


def examine(monkeypatch, capsys, *words: str) -> tuple[int, dict[str, str]]:
    """The exit code and each check's line."""
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--config", str(SMOKE), *words])
    code = main()
    return code, by_check(capsys.readouterr().out)


def by_check(printed: str) -> dict[str, str]:
    lines = [line for line in printed.splitlines() if line.startswith((*checkup.OUTCOMES, "not run"))]
    return {line[9:22].strip(): line for line in lines}


def test_a_sound_recipe_passes_and_nothing_is_left_behind(small, recipe, tmp_path, monkeypatch, capsys):
    code, lines = examine(monkeypatch, capsys, *recipe)
    assert code == 0 and list(lines) == CHECKS
    assert all(line.startswith(("ok", "slow")) for line in lines.values()), lines
    assert "3 shards, 40 training and 12 held-out rows; 2 training shards verified" in lines["shards"]
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_long_check_is_announced_before_it_begins(untrained, recipe, monkeypatch, capsys):
    def self_test(run, world) -> tuple[float, str]:
        announced.append(capsys.readouterr().out.splitlines()[-1])
        return 1.0, "not tried"

    announced = []
    monkeypatch.setattr(measurements, "self_test", self_test)
    examine(monkeypatch, capsys, *recipe)
    assert announced == ["trying   gradients    two steps of 2 blocks, by all ranks together and by each alone"]


def lose_a_shard(folder: Path) -> None:
    next((folder / "shards" / "heldout").iterdir()).unlink()


def damage_a_shard(folder: Path) -> None:
    shard = max((folder / "shards" / "train").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")


def test_a_run_folder_at_a_url_is_tried_there(untrained, recipe, monkeypatch, capsys):
    code, lines = examine(monkeypatch, capsys, *recipe, "output_dir=memory://doctors_bucket/runs")
    assert code == 0 and "memory://doctors_bucket/runs/smoke: " in lines["writing"]
    assert lines["room"].startswith(f"ok       room         {tempfile.gettempdir()}")
    assert list_files("memory://doctors_bucket") == []


FAULTS = {
    "a missing shard": (lose_a_shard, "", "shards", "lacks 1 of 3 shards (heldout/heldout-00000-000000.tar): copy"),
    "a corrupt shard": (damage_a_shard, "", "shards", "train-00001-000000.tar is corrupt"),
    "no room": (None, "checkpoint.keep_last=1000000000", "room", "free room, set output_dir to another disk"),
    "no shards": (None, "data.shards=nowhere", "shards", "no shards at nowhere"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_exit_code_1(untrained, fault, recipe, tmp_path, monkeypatch, capsys):
    inject, override, check, needle = FAULTS[fault]
    if inject:
        inject(tmp_path)
    code, lines = examine(monkeypatch, capsys, *recipe, *filter(None, [override]))
    assert code == 1
    assert lines[check].startswith("FAILS") and needle in lines[check]
    assert [name for name, line in lines.items() if line.startswith("FAILS")] == [check]
    trains = check != "shards"  # the whole steps may take long, and the run cannot start yet
    assert lines["steps"].startswith("ok" if trains else "not run  steps        waits until what failed above")


def test_a_run_folder_of_another_run_or_in_use_is_found(untrained, recipe, monkeypatch, capsys):
    run = load_run_config(SMOKE, recipe)
    place = run.run_dir / "checkpoints"
    place.mkdir(parents=True)
    other = run.model_copy(update={"seed": 7, "init_from": "base@4"})
    save_steps(place, [3], details={"config": other.to_json(), "data": {"train_rows": 40}})
    (run.run_dir / "config.yaml").write_text(other.to_yaml())
    code, lines = examine(monkeypatch, capsys, *recipe, "init_from=base")
    assert code == 1 and "seed: the checkpoint was trained with 7; the run says 0" in lines["run folder"]
    assert "init_from:" not in lines["run folder"], "base@4 is what the run began with"
    with claimed(run.run_dir):
        code, lines = examine(monkeypatch, capsys, *recipe)
    assert code == 1 and f"is in use by process {os.getpid()}" in lines["run folder"]
    assert [path.name for path in place.iterdir()] == ["step_000000003"]


def test_a_recipe_that_diverges_is_found(small, recipe, monkeypatch, capsys):
    code, lines = examine(monkeypatch, capsys, *recipe, "optimizer.peak_learning_rate=1e30")
    assert code == 1 and lines["gradients"].startswith(("ok", "slow")) and lines["loader"].startswith("not run")
    assert lines["steps"].startswith("FAILS") and "are not all finite: lower optimizer.peak_learn" in lines["steps"]


def test_a_disk_that_takes_no_more_is_found(untrained, recipe, monkeypatch, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, before[1]))
    try:
        code, lines = examine(monkeypatch, capsys, *recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1 and "cannot be written to (File too large): set output_dir, or free room" in lines["writing"]


def test_a_recipe_with_mistakes_is_refused_with_exit_code_2(recipe, monkeypatch, capsys):
    assert examine(monkeypatch, capsys, *recipe, "train.num_steps=-1") == (2, {})


def _examine_on_ranks(recipe: list[str]) -> list[dict[str, str]]:
    """Rank 0's lines of a sound recipe, of a batch that the ranks do not divide, and with the faults of rank 1."""
    hurry(setattr)
    lines = []
    with start_world(60, "cpu", init_group=True) as world:
        for overrides in ([], ["train.micro_batch_size=8"], []):
            if len(lines) == 2 and world.rank == 1:
                inject_faults()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                Checkup(load_run_config(SMOKE, [*recipe, *overrides]), world).examine()
            lines.append(by_check(printed.getvalue()))
    return lines


def inject_faults() -> None:
    """A sum is wrong in one place, and a tenth of the gradients is lost."""
    send, backward = collective_check._run, Fsdp2Engine.backward

    def send_with_a_wrong_number(kind, given, result):
        send(kind, given, result)
        result[7] += 1

    collective_check._run = send_with_a_wrong_number
    Fsdp2Engine.backward = lambda engine, loss, is_last: backward(engine, loss * 0.9, is_last)


def test_what_is_wrong_between_ranks_is_found_with_its_rank(recipe):
    (sound, undivided, faulty), others = run_ranks(_examine_on_ranks, 2, [*recipe, "engine.kind=fsdp2"])
    assert others == [{}, {}, {}]
    assert list(sound) == CHECKS and all(line.startswith(("ok", "slow")) for line in sound.values()), sound
    assert "2 ranks x micro_batch_size must divide train.global_batch_size = 8" in undivided["ranks"]
    assert [undivided[name].startswith("not run") for name in CHECKS] == [False] * 5 + [True] * 5
    assert faulty["collectives"].startswith(
        "FAILS    collectives  rank 1: all-reduce of 1 KiB has 1 wrong numbers; all-"
    )
    assert faulty["gradients"].startswith("FAILS") and "fsdp2 differs from one process" in faulty["gradients"]
    assert faulty["steps"].startswith("not run")


def test_a_rank_with_another_environment_is_named():
    row = {"rank": "0", "host": "a", "device": "H100", "torch": "2.13.0", "free GiB": "79.0", "of GiB": "80.0"}
    rows = [row, row | {"rank": "1"}, row | {"rank": "2", "host": "b", "torch": "2.12.0", "free GiB": "40.0"}]
    assert checkup._problems(rows[:2]) == []
    version, memory = checkup._problems(rows)
    assert version.startswith("torch: most ranks have 2.13.0, rank 2 on b 2.12.0; start the run")
    assert memory.startswith("rank 2 on b: only 40.0 of 80.0 GiB of its GPU's memory are free; end the other")
    assert checkup._table(rows).splitlines()[3].split() == list(rows[2].values())
