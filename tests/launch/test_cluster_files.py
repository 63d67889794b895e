"""What the image and the Slurm script give a run on many nodes."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_image_has_what_nccl_and_deepspeed_need_between_nodes():
    (packages,) = re.findall(r"apt-get install (.*?) &&", (ROOT / "docker/Dockerfile").read_text(), re.DOTALL)
    assert {"rdma-core", "libibverbs1", "ibverbs-providers", "pdsh", "openssh-client"} <= set(packages.split())


def test_slurm_gives_each_rank_its_cores_and_variables(tmp_path):
    """With stand-ins for Slurm's programs: srun starts one of 16 tasks, and python shows what it gets.

    srun sends the script SIGUSR1 first, as `scancel --signal=USR1 --full` does, which must not end it.
    """
    script = ROOT / "launch/slurm/pretrain.sbatch"
    assert "#SBATCH --open-mode append\n" in script.read_text()  # else a requeued job empties its output file
    (cpus_per_task,) = re.findall(r"^#SBATCH --cpus-per-task (\d+)$", script.read_text(), re.MULTILINE)
    for name, text in {
        "scontrol": "seq --format 'node%.0f' 20000",  # more than a pipe holds
        "srun": 'kill -USR1 $PPID; while [[ $1 == -* ]]; do echo "$1"; shift; done\n'
        'SLURM_PROCID=11 SLURM_LOCALID=3 exec "$@"',
        "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "SLURM_CPUS_PER_TASK": cpus_per_task,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "16",
        "SLURM_JOB_ID": "123456",
    }
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, "--config", "a b"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done
    *options, started = done.stdout.splitlines()
    assert f"--cpus-per-task={cpus_per_task}" in options and "--cpu-bind=cores" in options and int(cpus_per_task) > 1
    assert started == "11 3 16 node1 23456 launch/pretrain.py --config a b"
