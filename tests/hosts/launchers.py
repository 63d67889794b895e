"""Starts pretraining on several hosts by torchrun, by DeepSpeed over pdsh and ssh, or by Slurm."""

import os
import subprocess
import sys
from pathlib import Path

from gmlp_scale.checkpoint.stores import newest_checkpoint
from gmlp_scale.engine import SHARDED_ENGINES, engine_overrides
from tests.hosts.hosts import ROOT, Host, Job, wait_until
from tests.whole_runs import losses
from tests.written_shards import VOCAB_SIZE

NUM_STEPS, SAVE_EVERY_STEPS, GLOBAL_BATCH_SIZE = 60, 10, 8
FAULT_STEP = 12
NEVER = f"checkpoint.save_every_steps={10 * NUM_STEPS}"
RECIPE = [
    "--config", "configs/pretrain/smoke.yaml", "name=run", "model.num_blocks=2", "model.d_model=16", "model.d_ffn=32",
    "model.sequence_length=32", f"model.vocab_size={VOCAB_SIZE}", f"train.num_steps={NUM_STEPS}",
    f"train.global_batch_size={GLOBAL_BATCH_SIZE}", "train.evaluate_every_steps=30", "train.num_evaluation_rows=10",
    "optimizer.warmup_steps=2", f"checkpoint.save_every_steps={SAVE_EVERY_STEPS}",
]  # fmt: skip
ENGINES = {name: engine_overrides(engine) for name, engine in SHARDED_ENGINES.items()}
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}


class Torchrun:
    """An agent of torchrun on every host. The first host has the rendezvous."""

    def __init__(self, login: Host, hosts: list[Host]):
        self.hosts = hosts

    def serve(self, host: Host) -> None:
        """A host that is back needs nothing."""

    def start(self, num_ranks: int, arguments: list[str]) -> list[Job]:
        words = [
            "torchrun", "--nnodes", len(self.hosts), "--nproc_per_node", num_ranks, "--rdzv_backend", "c10d",
            "--rdzv_endpoint", f"{self.hosts[0].name}:29400", "--rdzv_id", "run", "launch/pretrain.py", *arguments,
        ]  # fmt: skip
        return [host.start(*words, environment=ENVIRONMENT) for host in self.hosts]


class Ssh:
    """An sshd on every host, which `login` may enter without a password."""

    def __init__(self, login: Host, hosts: list[Host]):
        self.login, self.hosts, folder = login, hosts, login.folder
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin yes\nPidFile none\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {folder}/user_key\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        login.call("mount", "--bind", folder / "ssh_config", "/etc/ssh/ssh_config")
        for host in hosts:
            self.serve(host)

    def serve(self, host: Host) -> None:
        host.call("mkdir", "-p", "/run/sshd")
        host.start("/usr/sbin/sshd", "-D", "-e", "-f", host.folder / "sshd_config").wait_for("Server listening on 0")

    def start(self, num_ranks: int, arguments: list[str]) -> list[Job]:
        hostfile = self.login.folder / "hostfile"
        hostfile.write_text("".join(f"{host.name} slots={num_ranks}\n" for host in self.hosts))
        # The variables that DeepSpeed gives the hosts stand in a file of the user's home folder.
        (self.login.folder / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\n")
        words = ["deepspeed", "--hostfile", hostfile, "--launcher", "pdsh", "launch/pretrain.py", *arguments]
        return [self.login.start(*words, environment=ENVIRONMENT | {"HOME": str(self.login.folder)})]


class Slurm:
    """munged and slurmctld on `login`, a slurmd with 8 cores and 8 devices for GPUs on every host."""

    def __init__(self, login: Host, hosts: list[Host]):
        self.login, self.hosts, self.folder = login, hosts, login.folder
        self.environment = ENVIRONMENT | {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        for number in range(8):
            os.mknod(self.folder / f"gpu{number}", 0o020666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        nodes = [f"NodeName={h.name} NodeAddr={h.address} NodeHostname={h.name} CPUs=8 Gres=gpu:8" for h in hosts]
        settings = SETTINGS.format(folder=self.folder, address=login.address)
        (self.folder / "slurm.conf").write_text("\n".join([settings, *nodes, ""]))
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        login.start(
            "/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        wait_until((self.folder / "munge.socket").exists, "munged's socket")
        login.start("/usr/sbin/slurmctld", "-D", environment=self.environment)
        for host in hosts:
            self.serve(host)
        self.wait_for_nodes()

    def serve(self, host: Host) -> None:
        host.start("/usr/sbin/slurmd", "-D", "-N", host.name, environment=self.environment)

    def wait_for_nodes(self) -> None:
        names = [host.name for host in self.hosts]
        wait_until(lambda: self._states() == dict.fromkeys(names, "idle"), lambda: f"idle nodes: {self._states()}")

    def _states(self) -> dict[str, str]:
        # Until slurmctld listens, sinfo fails.
        lines = self.call("sh", "-c", "sinfo -hNo '%N %t' || true").splitlines()
        return dict(line.split() for line in lines)

    def call(self, *command: object) -> str:
        return self.login.call(*command, environment=self.environment)

    def start(
        self, num_ranks: int, arguments: list[str], *, name: str = "job", least: int | None = None
    ) -> list["SlurmJob"]:
        """launch/slurm/pretrain.sbatch as it is, but for smaller nodes; elastic.sbatch if it may go on with `least`."""
        script, options = "pretrain", ["--ntasks-per-node", num_ranks, "--gpus-per-node", num_ranks]
        if least:
            script, options = "elastic", ["--gpus-per-node", num_ranks]
            arguments = ["--hosts", f"{least}:{len(self.hosts)}", *arguments]
        words = [
            "sbatch", "--parsable", "--nodes", len(self.hosts), "--cpus-per-task", 1, *options,
            "--output", self.folder / f"{name}.out", f"launch/slurm/{script}.sbatch", *arguments,
        ]  # fmt: skip
        return [SlurmJob(self, self.call(*words).strip(), self.folder / f"{name}.out")]


class SlurmJob:
    def __init__(self, slurm: Slurm, number: str, log: Path):
        self.slurm, self.number, self.log = slurm, number, log

    def printed(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def state(self) -> str:
        """As "COMPLETED 0:0": the state, and the exit code with the signal."""
        return "{JobState} {ExitCode}".format(**self._fields())

    def wait_for_restart(self) -> None:
        """Until Slurm has requeued it."""
        wait_until(lambda: self._fields()["Restarts"] == "1", lambda: f"a requeue of {self.state()} {self.printed()}")

    def _fields(self) -> dict[str, str]:
        shown = self.slurm.call("scontrol", "show", "job", self.number)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def end(self) -> str:
        """Waits for its end and returns its state."""
        going = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED")
        wait_until(lambda: not self.state().startswith(going), lambda: f"the end of {self.state()} {self.printed()}")
        return self.state()


class Run:
    """The run `run`, on `num_ranks` of each host. `start` starts it, also again."""

    def __init__(
        self, launcher: str, engine: str, num_ranks: int, login: Host, hosts: list[Host], shards: Path, folder: Path
    ):
        self.cluster = {"torchrun": Torchrun, "deepspeed": Ssh, "sbatch": Slurm}[launcher](login, hosts)
        self.login, self.hosts, self.num_ranks = login, hosts, num_ranks
        self.run_dir = folder / "run"
        # Every rank adds up two micro-batches where it has two rows.
        micro_batch_size = max(1, GLOBAL_BATCH_SIZE // (num_ranks * len(hosts)) // 2)
        places = [f"data.shards={shards}", f"output_dir={folder}"]
        self.arguments = [*RECIPE, *ENGINES[engine], *places, f"train.micro_batch_size={micro_batch_size}"]
        self.jobs: list[Job | SlurmJob] = []

    def start(self, *more: str, **options) -> None:
        self.jobs = self.cluster.start(self.num_ranks, [*self.arguments, *more], **options)

    def start_and_wait(self, *more: str, **options) -> None:
        """Until step FAULT_STEP is logged."""
        self.start(*more, **options)
        metrics = self.run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and max(losses(self.run_dir), default=0) >= FAULT_STEP, "the step")

    def printed(self) -> str:
        return "".join(job.printed() for job in self.jobs)

    def end(self) -> list[int | str]:
        return [job.end() for job in self.jobs]

    def end_well(self) -> None:
        assert not {*self.end()} - {0, "COMPLETED 0:0"}, self.printed()

    def bring_back(self, host: Host) -> None:
        """Boots a lost host, with what the launcher needs there."""
        host.boot(self.login)
        self.cluster.serve(host)

    def assert_saved(self) -> None:
        """At the step at which it was stopped, as no save was due."""
        checkpoint, damaged = newest_checkpoint(self.run_dir / "checkpoints")
        assert checkpoint and FAULT_STEP <= checkpoint.step < NUM_STEPS and not damaged


# cred_expire: the seconds after which Slurm starts a requeued job again; 120 by default.
SETTINGS = """\
ClusterName=hosts
SlurmctldHost=login({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5
ReturnToService=2
SlurmdTimeout=20
KillWait=5
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
PartitionName=all Nodes=ALL Default=YES State=UP"""
