"""Running the tasks of a pass on this machine, on a Ray cluster, or as a Slurm job array."""

import shutil
import subprocess
import sys
from collections import deque
from concurrent.futures import as_completed
from multiprocessing import get_context
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from gmlp_scale.errors import InputError, UserError
from gmlp_scale.prepare.dedup import Pass
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.worker_pool import pool_of_workers

_MOST_RESTARTS_OF_A_TASK = 5


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's executor with another pool: multiprocessing's, which datatrove uses, waits for ever when a worker is
    killed."""

    def run(self) -> None:
        """Run the tasks that have no completion mark. Raises UserError where a worker was killed."""
        context = get_context("forkserver")
        context.set_forkserver_preload(["gmlp_scale.prepare.run_job"])  # imported once for all workers
        with pool_of_workers(self.workers, context) as pool:
            tasks = [pool.submit(self._run_for_rank, rank, local_rank=1) for rank in self.get_incomplete_ranks()]
            for task in as_completed(tasks):
                task.result()


class RayExecutor(RayPipelineExecutor):
    """datatrove's executor with Ray's plain tasks in place of actors. A task starts again elsewhere when its process or
    machine is lost; a pool of actors waits for a killed process for ever."""

    _run_for_rank = PipelineExecutor._run_for_rank  # RayPipelineExecutor's logs to a folder of /tmp that all jobs share

    def run(self) -> None:
        """Run the tasks that have no completion mark. Raises UserError where no cluster is found or Ray gives up."""
        try:
            import ray
        except ImportError as error:
            raise InputError("--executor ray needs the package ray: pip install ray") from error
        waiting, running = deque(self.get_incomplete_ranks()), []
        if not waiting:
            return
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except ConnectionError as error:
            raise UserError("--executor ray finds no cluster: run `ray start`, or set RAY_ADDRESS") from error
        try:
            run_task = ray.remote(num_cpus=1, max_retries=_MOST_RESTARTS_OF_A_TASK)(_run_ray_task)
            executor = ray.put(self)
            while waiting or running:
                while waiting and len(running) < self.workers:
                    running.append(run_task.remote(executor, waiting.popleft()))
                (done,), running = ray.wait(running)
                ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise UserError(
                f"Ray gave a task up ({type(error).__name__}); the same command again goes on with the tasks that are "
                "not done"
            ) from error
        finally:
            ray.shutdown()


def _run_ray_task(executor: RayExecutor, rank: int) -> None:
    executor._run_for_rank(rank, local_rank=1)


def submit_to_slurm(passes: list[Pass], options: JobOptions) -> bool:
    """Submit the passes that are not done, each to start after the one before. Returns whether all were done."""
    job = options.job
    if not shutil.which("sbatch"):
        raise InputError("--executor slurm finds no sbatch: run it on a machine of the cluster that can submit jobs")
    before = job.read("slurm.json")
    if before and _is_in_slurm_queue(before["slurm_job"]):
        raise UserError(
            f"Slurm job {before['slurm_job']} still works on {job.output}: wait until it has left the queue, or "
            f"scancel {before['slurm_job']}"
        )
    executor = None
    for one in passes:
        executor = SlurmPipelineExecutor(
            one.steps,
            one.num_tasks,
            options.slurm_time,
            options.slurm_partition,
            workers=options.workers,
            logging_dir=f"{job.url}/executor-{one.name}",
            depends=executor,
            job_name=one.name,
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
            qos=None,
        )
    if not executor.get_incomplete_ranks():
        return True
    executor.run()  # submits the passes before it too
    job.write("slurm.json", {"slurm_job": str(executor.job_id)})
    return False


def _is_in_slurm_queue(slurm_job: str) -> bool:
    """Whether a job that was submitted has not ended."""
    listing = subprocess.run(["squeue", "--noheader", "--jobs", slurm_job], capture_output=True, text=True)
    return bool(listing.stdout.strip())  # Slurm forgets ended jobs, and then ends with an error
