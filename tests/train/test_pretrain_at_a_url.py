"""Whole pretraining runs whose run folder is in a bucket: on two hosts, killed, resumed, refused, read."""

import json
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import torch

from gmlp_scale.checkpoint.stores import RemoteCheckpoints
from gmlp_scale.storage.claim import hold_folder
from gmlp_scale.storage.files import list_files
from tests.forked import Script
from tests.gloo_ranks import rank_variables
from tests.whole_runs import FSDP2, RECIPE, SINGLE, SMOKE, logged, run_in_turn

URL = "s3://bucket/runs"


def start_hosts(recipe: list[str], folder: Path, num_hosts: int, dies: bool = False) -> list[Script]:
    """One rank on each of several hosts, which have no temporary folder in common."""
    for host in range(num_hosts):
        (folder / f"host_{host}").mkdir(parents=True)
    return [
        Script(
            "launch/pretrain.py",
            ["--config", SMOKE, *recipe],
            environment={**variables, "LOCAL_RANK": "0"},
            prepare=partial(prepare, folder / f"host_{host}", dies),
        )
        for host, variables in enumerate(rank_variables(num_hosts))
    ]


def end(ranks: list[Script], *codes: int) -> str:
    found, _, errors = zip(*[rank.end() for rank in ranks], strict=True)
    assert found == codes, "\n".join(errors)
    assert "Traceback" not in errors[0]
    return errors[0]


def prepare(temporary: Path, dies: bool) -> None:
    """What TMPDIR would do, and a kill as step 6 is uploaded."""
    torch.set_num_threads(1)
    tempfile.tempdir = str(temporary)
    write = RemoteCheckpoints.write

    def write_and_die(self, name, *arguments):
        receipt = write(self, name, *arguments)
        if name == "step_000000006":
            os.kill(os.getpid(), signal.SIGKILL)
        return receipt

    if dies:
        RemoteCheckpoints.write = write_and_die


def test_a_run_of_two_hosts_killed_in_an_upload_resumes_elsewhere(s3, server, forty_rows, tmp_path):
    recipe = [*RECIPE, *FSDP2, f"data.shards={forty_rows}"]
    run_in_turn(2, [*recipe, f"output_dir={tmp_path / 'undisturbed'}"])
    recipe.append(f"output_dir={URL}")
    server.fault_fraction, before = 0.1, server.faults
    end(start_hosts(recipe, tmp_path / "first", 2, dies=True), -9, -9)
    names = {name.partition("/DONE")[0] for name in list_files(f"{URL}/smoke") if name.endswith("DONE")}
    assert names == {"checkpoints/step_000000002", "checkpoints/step_000000004"}
    printed = end(start_hosts(recipe, tmp_path / "second", 2), 0, 0)
    assert "resuming from" in printed and "step_000000004" in printed and f"finished at step 9: {URL}/smoke" in printed
    assert server.faults > before + 3 and not Path("s3:").exists()
    found, undisturbed = logged(f"{URL}/smoke"), logged(tmp_path / "undisturbed" / "smoke")
    # The evaluation after step 4 may have been logged after that step's last upload, as after the save on a disk.
    assert [row for row in found if row["step"] != 4 or "eval/loss" not in row] == [
        row for row in undisturbed if row["step"] != 4 or "eval/loss" not in row
    ]
    assert not list(tmp_path.glob("second/*/*/*")), "nothing stays in the hosts' temporary folders"
    left = {name.split("/")[1] for name in list_files(f"{URL}/smoke") if name.startswith("checkpoints/")}
    assert left == {"step_000000006", "step_000000008", "step_000000009"}
    assert sum("tensorboard/events" in name for name in list_files(f"{URL}/smoke")) == 2, "of both jobs"
    server.fault_fraction = 0.05
    _read_by_every_script(forty_rows, tmp_path)


def _read_by_every_script(shards: Path, tmp_path: Path) -> None:
    run = f"{URL}/smoke"
    recipe = [*RECIPE, *SINGLE, f"data.shards={shards}", f"output_dir={URL}"]
    dry = script("launch/pretrain.py", "--config", SMOKE, *recipe, "--dry-run")
    assert f"would resume from       {run}/checkpoints/step_000000009" in dry
    curve = tmp_path / "curve.json"
    arguments = ["--run", f"{run}/", "--all-steps", "--shards", shards, "--rows", 10, "--output", curve]
    printed = script("launch/evaluate.py", *arguments)
    assert printed.startswith(f"{run}: ")
    assert [of["place"] for of in json.loads(curve.read_text())["models"]] == [
        f"{run}/checkpoints/step_{step:09d}" for step in (6, 8, 9)
    ]
    assert any(name.startswith("tensorboard/evaluation/") for name in list_files(run))
    printed = script("launch/export.py", "--run", f"{run}/", "--step", 8, "--output", tmp_path / "export")
    assert f"holds {run}/checkpoints/step_000000008" in printed
    details = json.loads((tmp_path / "export" / "config.json").read_text())["details"]
    assert details["step"] == 8 and details["heldout"]["step"] == 8


def script(file: str, *arguments: object) -> str:
    code, printed, errors = Script(file, arguments).end()
    assert code == 0, errors
    return printed


def test_a_second_job_is_refused(s3, quick, forty_rows, tmp_path):
    with hold_folder(f"{URL}/smoke", f"{URL}/smoke/claims"):
        printed = end(start_hosts([*RECIPE, *SINGLE, f"data.shards={forty_rows}", f"output_dir={URL}"], tmp_path, 1), 1)
    assert f"another job writes to {URL}/smoke: process {os.getpid()} on" in printed
