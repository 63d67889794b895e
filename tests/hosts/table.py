"""docs/many-nodes.md: how to start a run on several hosts, and what `make hosts` tried and found."""

import datetime
import os

import torch

ROWS = (
    "losses of one process, within 1e-5: torchrun",
    "losses of one process, within 1e-5: deepspeed over pdsh and ssh",
    "losses of one process, within 1e-5: sbatch",
    "a host's processes killed",
    "link cut for 5 s",
    "link cut for good",
    "SIGSTOP of a rank",
    "SIGTERM to a rank",
    "SIGTERM to an agent or launcher",
    "Slurm's signals",
    "requeued by Slurm",
    "Slurm's elastic form",
    "two jobs on the same hosts",
    "elastic: hosts killed and back again",
    "elastic: SIGTERM to one of 4 launchers",
)


def table(records: list[list]) -> str:
    """Markdown: a line for each row, with what its trials showed."""
    lines = ["| tried | trials | as it should | lost | seen |", "|---|---|---|---|---|"]
    for row in ROWS:
        of_row = [(lost, shown) for other, lost, shown in records if other == row]
        if not of_row:
            lines.append(f"| {row} | 0 | | | not tried in this run |")
            continue
        lost = sum(lost for lost, _ in of_row)
        lines.append(f"| {row} | {len(of_row)} | {len(of_row) - lost} | {lost} | {'; '.join(s for _, s in of_row)} |")
    return "\n".join(lines)


def document(records: list[list], seconds: float) -> str:
    where = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, no GPU"
    return f"{_HEAD}\n{datetime.date.today()}, {where}, {seconds / 60:.1f} minutes.\n\n{table(records)}\n"


_HEAD = """\
# Many nodes

## Starting a run

Every form starts the same command on every host. The shards, the tokenizer and `output_dir` are on a filesystem that all
hosts see, or at URLs.

| | command | stops and saves at |
|---|---|---|
| Slurm | `sbatch --nodes 4 launch/slurm/pretrain.sbatch --config ... ` | `scancel --signal=USR1`, also with `--full`, `scontrol requeue`, the time limit |
| the same, with restarts on the nodes that are left | `sbatch --nodes 2 launch/slurm/elastic.sbatch --hosts 1:2 --config ...` | the same |
| DeepSpeed | `deepspeed --hostfile hosts launch/pretrain.py --config ...` on one host | SIGTERM or Ctrl-C to it, or SIGTERM to a rank |
| torchrun | `torchrun --nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:PORT --rdzv_id JOB launch/pretrain.py --config ...` on every host | SIGTERM to a rank |
| the same, with hosts that come and go | `python launch/elastic.py --hosts 1:2 --ranks-per-host 8 --rendezvous HOST:PORT --config ...` on every host | SIGTERM or Ctrl-C to one of them |
| Kubernetes | `kubectl create --filename launch/kubernetes/pretrain.yaml`, which starts `launch/elastic.py` in a pod for each host | deleting or draining a pod: all save, and the Job starts them again |
| SkyPilot | `sky jobs launch --env BUCKET=s3://YOUR-BUCKET launch/skypilot.yaml` | a preempted instance: the job starts again and resumes |

Give two jobs that share a host different ports: `MASTER_PORT`, `--rdzv_endpoint`, `deepspeed --master_port`. The Slurm
script takes one that follows from the job's number. A rank that reaches another run's store is refused, and the message
names both runs. A port that is taken is named too.

SIGTERM to one of torchrun's own agents makes all ranks save, but the other agents wait up to 300 s for it (torch 2.13),
unless it has the rendezvous. `launch/elastic.py` passes the signal to its ranks only, also with a fixed number of hosts
(`--hosts 4`). DeepSpeed gives its launchers' environment only few variables: put the others into `~/.deepspeed_env`.

## A lost host

The ranks of the others end with one line that names the missing ranks, their host and the step: at once if the kernel of
the lost host closed its connections, else after `engine.timeout_seconds`; finding the names takes up to 5 s. Where the
host of rank 0 is lost, the ranks' key-value store is lost with it, and the line says so. The same command then resumes.
Slurm requeues a job whose host is lost (`--requeue`), once it finds the host down (SlurmdTimeout), and starts it again
2 minutes later (cred_expire). Starting it sooner by hand may lose it a node again; the script then asks for another requeue.
The ranks of a host that is cut off end too, but torchrun's agent there stays until its kernel gives the connection up,
minutes later (net.ipv4.tcp_retries2).

`launch/elastic.py` goes on by itself: with the hosts that are left, as long as there are LEAST of them, and with more as
soon as they join. Every number of hosts in the range must fit: ranks x `train.micro_batch_size` divides the batch. On hosts
of 8 GPUs a batch of 256 fits 1, 2 or 4 of them, so give `1:2` or `4`; a batch of 384 also fits `2:4`. Every start resumes
from the newest checkpoint with the same global batches. To take a host away, kill its launcher (SIGKILL).
A failure that a restart would meet again ends the run on all hosts: a mistake in what was asked, a corrupt shard, a loss that is
not finite. The host where it happened prints the message and leaves with 2. A host that only lost the others leaves with 3.
On each host the ranks are forked from a process that has imported all that is slow. The hosts meet at a store. One of
the hosts has it, and the job ends with that host. Where any host may be lost, another machine has it:
`launch/elastic.py --help` has the line.

## What was tried

`make hosts` tries it, as root on Linux, and writes this file. The packages, on Debian:

    apt-get install --no-install-recommends slurm-wlm munge pdsh openssh-server openssh-client iproute2

The hosts are namespaces of one machine, joined by a bridge: each has processes, mounts, a network address and a name of
its own. These are real: the network's protocols, a cable pulled out, every process of a host killed at once, torchrun's agents,
DeepSpeed's launchers over pdsh and an sshd on each host, munged, slurmctld and a slurmd on each host. Missing are a second
machine, a power cut, InfiniBand, NCCL, a GPU, a network filesystem. No cluster ran the files for Kubernetes and
SkyPilot: tests hold the first to Kubernetes' published schema, and start the command lines of both as dry runs. A run is the small recipe of 60 steps over gloo,
compared with one process. The seconds depend on what else the machine does.
"""  # noqa: E501
