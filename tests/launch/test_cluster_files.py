"""What the image, the Slurm script and the files for Kubernetes and SkyPilot give a run on many nodes."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import torch.distributed.run
import yaml

from launch import elastic, pretrain

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """dry_run(words, number of ranks): what launch/pretrain.py says of the run; its command line must be right."""

    def run(words: list[str], num_ranks: int) -> str:
        monkeypatch.chdir(ROOT)
        assert words[0].endswith("launch/pretrain.py")
        monkeypatch.setattr(sys, "argv", [*words, "--dry-run", "--ranks", str(num_ranks)])
        assert pretrain.main() == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def elastic_start(monkeypatch):
    """elastic_start(words): its exit code, the options that it gives torchrun, and a rank's words."""
    started = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.distributed.run, "main", started.append)
    monkeypatch.setattr(elastic.signal, "signal", lambda *_: None)
    monkeypatch.setattr(elastic, "_start_rank_server", lambda: None)

    def start(words: list[str]) -> tuple[int, dict[str, str], list[str]]:
        monkeypatch.setattr(sys, "argv", words)
        code = elastic.main()
        script = next(index for index, word in enumerate(started[0]) if word.endswith("pretrain.py"))
        return code, dict(zip(started[0][:script:2], started[0][1:script:2], strict=True)), started[0][script:]

    return start


def test_the_image_has_what_nccl_and_deepspeed_need_between_nodes():
    (packages,) = re.findall(r"apt-get install (.*?) &&", (ROOT / "docker/Dockerfile").read_text(), re.DOTALL)
    assert {"rdma-core", "libibverbs1", "ibverbs-providers", "pdsh", "openssh-client"} <= set(packages.split())


def test_the_image_installs_what_a_run_needs_and_nothing_of_the_tests():
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    (extras,) = re.findall(r"--constraint requirements-dev.lock (.*)", dockerfile)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, optional = project["dependencies"], project["optional-dependencies"]
    in_image = [package for extra in ("s3", "wandb", "images", "plot") for package in optional[extra]]
    assert extras.split() == sorted(in_image)
    run, dev = (_locked(ROOT / name) for name in ("requirements.lock", "requirements-dev.lock"))
    assert {"setuptools", *map(_name, needed)} <= run and not run & dev
    assert {_name(package) for extra in optional.keys() - {"gs"} for package in optional[extra]} <= dev
    assert project["requires-python"] == ">=3.11" and "FROM python:3.11." in dockerfile


def _locked(lock: Path) -> set[str]:
    return {_name(line) for line in lock.read_text().splitlines() if "==" in line}


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0].lower()


def test_the_image_does_not_run_as_root():
    steps = [line.split() for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if line[:1].isupper()]
    (user,) = [step[1] for step in steps if step[0] == "USER"]
    assert user == "trainer" and all("--chown=trainer" in step for step in steps if step[0] == "COPY")


def test_kubernetes_starts_one_pod_for_each_host(dry_run, elastic_start):
    service, job = yaml.safe_load_all((ROOT / "launch/kubernetes/pretrain.yaml").read_text())
    for resource in (service, job):
        kubernetes_validate.validate(resource, "1.29", strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"] and pod["terminationGracePeriodSeconds"] >= 300
    assert {volume["name"]: volume for volume in pod["volumes"]}["shared-memory"]["emptyDir"]["medium"] == "Memory"

    assert container["command"] == ["python", "launch/elastic.py"]
    code, options, words = elastic_start([*container["command"][1:], *container["args"]])
    assert code == 75  # it has not trained, so the Job starts it again
    num_hosts = job["spec"]["completions"]
    assert options["--nnodes"] == f"{num_hosts}:{num_hosts}" and job["spec"]["parallelism"] == num_hosts
    assert options["--nproc-per-node"] == str(num_gpus)
    assert options["--rdzv-endpoint"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:29400"
    assert "parameters              130,073,552" in dry_run(words, num_hosts * num_gpus)


def test_skypilot_starts_torchrun_on_every_node(dry_run, tmp_path):
    task = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    assert task.keys() <= {"name", "num_nodes", "workdir", "resources", "envs", "setup", "run"}
    num_gpus = int(task["resources"]["accelerators"].partition(":")[2])
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    torchrun = tmp_path / ".venv" / "bin" / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    of_the_node = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": str(num_gpus),
        "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    }  # fmt: skip
    environment = os.environ | task["envs"] | of_the_node
    script = ["bash", "-euo", "pipefail", "-c", task["run"]]
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True)
    words = done.stdout.splitlines()
    first = words.index("launch/pretrain.py")
    options = dict(zip(words[:first:2], words[1:first:2], strict=True))
    assert options == {
        "--nnodes": "2", "--nproc_per_node": "8", "--node_rank": "1", "--master_addr": "10.0.0.7",
        "--master_port": "29400",
    }  # fmt: skip
    overrides = [word for word in words[first:] if not word.startswith(("output_dir=", "data."))]  # those of the bucket
    assert "parameters              130,073,552" in dry_run(overrides, 2 * num_gpus)


@pytest.fixture
def start_under_slurm(tmp_path):
    """start_under_slurm(script, arguments, whole=True, code=0, variables): launch/slurm's script, done on node 1 of 2.

    Stand-ins for Slurm's programs: srun prints its options and starts one of 16 tasks, scontrol prints what it is asked
    to do, python shows what it gets and leaves with `code`. Without `whole` srun cannot have all nodes. srun sends the
    script SIGUSR1 first, as `scancel --signal=USR1 --full` does, which must not end it.
    """
    variables = {
        "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "16",
        "SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    for name, text in {
        # More names than a pipe holds.
        "scontrol": '[[ $1 == show ]] || exec echo "scontrol $*"; seq --format "node%.0f" 20000',
        "srun": 'kill -USR1 $PPID; [[ "$*" != "--immediate=60 true" ]] || exec $WHOLE\n'
        'while [[ $1 == -* ]]; do echo "$1"; shift; done; SLURM_PROCID=11 SLURM_LOCALID=3 exec "$@"',
        "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $TRITON_CACHE_DIR" "$@"; exit $CODE',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    (tmp_path / "launch").symlink_to(ROOT / "launch")

    def start(script: str, *arguments: str, whole: bool = True, code: int = 0, **more: str | None):
        environment = os.environ | variables | {"WHOLE": str(whole).lower(), "CODE": str(code)} | more
        environment = {name: value for name, value in environment.items() if value is not None}
        words = ["bash", f"launch/slurm/{script}", *arguments]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return start


def test_slurm_gives_each_rank_its_cores_and_variables(start_under_slurm):
    directives = (ROOT / "launch/slurm/pretrain.sbatch").read_text()
    assert "#SBATCH --open-mode append\n" in directives  # else a requeued job empties its output file
    assert "#SBATCH --cpus-per-task 8\n" in directives
    done = start_under_slurm("pretrain.sbatch", "--config", "a b")
    assert done.returncode == 0, done
    *options, started = done.stdout.splitlines()
    assert {"--cpus-per-task=8", "--cpu-bind=cores", "--distribution=block:block"} <= {*options}
    assert started == f"11 3 16 node1 23456 /tmp/triton-{os.getuid()} launch/pretrain.py --config a b"


def test_a_slurm_job_without_all_its_nodes_is_requeued(start_under_slurm):
    """Instead of an srun that waits for the others without end."""
    done = start_under_slurm("pretrain.sbatch", "--config", "a b", whole=False)
    assert (done.returncode, done.stdout) == (1, "scontrol requeue 123456\n"), done
    assert "cannot start a task on each of the job's 2 nodes: node[1-2]" in done.stderr


@pytest.mark.parametrize(
    "fails", [{"script": "pretrain.sbatch", "whole": False}, {"script": "elastic.sbatch", "code": 1}]
)
def test_a_slurm_job_that_begins_in_vain_is_requeued_5_times_in_a_row(fails, start_under_slurm, tmp_path):
    """Lives 0 to 2, then 4 to 9: life 3 trained. Both of an elastic job's nodes ask for the requeue of a life."""
    lives = [start_under_slurm(**fails, SLURM_RESTART_COUNT=str(life)) for life in (0, 1, 2, 4, 5, 5, 6, 7, 8, 9)]
    asked = ["scontrol requeue 123456" in done.stdout.splitlines() for done in lives]
    assert asked == [True] * 9 + [False], lives
    assert {done.returncode for done in lives} == {1} and "6 times in a row in vain" in lives[-1].stderr
    start_under_slurm(fails["script"])
    assert not [*tmp_path.glob("*.short-lives")], "a job that ends well leaves nothing"


@pytest.mark.parametrize(
    "variable, message",
    [
        ("SLURM_JOB_ID", "there is no Slurm job here: submit this script with sbatch"),
        ("SLURM_GPUS_ON_NODE", "the job has no GPUs: give sbatch --gpus-per-node"),
        ("SLURM_CPUS_PER_TASK", "give sbatch --cpus-per-task"),
    ],
)
def test_what_a_slurm_job_lacks_is_named(variable, message, start_under_slurm):
    done = start_under_slurm("elastic.sbatch", "--hosts", "1:2", **{variable: None})
    assert done.returncode and not done.stdout and done.stderr.endswith(f"{message}\n"), done


def test_slurm_starts_the_elastic_launcher_on_each_node(start_under_slurm, dry_run, elastic_start):
    directives = (ROOT / "launch/slurm/elastic.sbatch").read_text().splitlines()
    assert {"#SBATCH --open-mode append", "#SBATCH --no-kill", "#SBATCH --ntasks-per-node 1"} <= set(directives)
    recipe = ["--config", "configs/pretrain/gmlp_base.yaml", "train.micro_batch_size=8"]
    done = start_under_slurm("elastic.sbatch", "--hosts", "1:2", *recipe)
    assert done.returncode == 0, done
    *of_srun, started = done.stdout.splitlines()
    assert {"--no-kill", "--cpus-per-task=8", "--cpu-bind=cores", "--distribution=block:block"} <= set(of_srun)
    words = started.split()
    code, options, words = elastic_start(words[words.index("launch/elastic.py") :])
    assert code == 0 and options["--nnodes"] == "1:2" and options["--nproc-per-node"] == "8"
    assert options["--rdzv-endpoint"] == "node1:23456"
    assert "parameters              130,073,552" in dry_run(words, 16)


@pytest.mark.parametrize("code, asked", [(0, []), (1, ["scontrol requeue 123456"]), (2, [])])
def test_an_elastic_slurm_job_is_requeued_after_what_may_pass(code, asked, start_under_slurm):
    done = start_under_slurm("elastic.sbatch", "--hosts", "1:2", code=code)
    assert done.returncode == code
    assert [line for line in done.stdout.splitlines() if line.startswith("scontrol")] == asked
