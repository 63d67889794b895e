"""The passes of a tokenizing job, in order, and where their tasks run: on this machine, on a Ray cluster or as a Slurm
job array. The passes are decontamination and deduplication, then tokenizing into shards."""

import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor

from gmlp_scale.distributed.logs import progress_bar
from gmlp_scale.errors import InputError, UserError
from gmlp_scale.prepare.dedup import DEDUPLICATIONS, Pass, Step, count_documents, drop_contaminated
from gmlp_scale.prepare.job import JobOptions, pool_of_workers
from gmlp_scale.prepare.read_documents import read_documents, stored_bytes_of_task
from gmlp_scale.prepare.write_shards import write_shards
from gmlp_scale.storage.claim import repeating

_MOST_RESTARTS_OF_A_TASK = 5


def run_passes(options: JobOptions) -> bool:
    """Run every task that is not done, or submit them to Slurm. Returns whether all are done now."""
    passes = _plan_passes(options)
    if options.executor == "slurm":
        return _submit_to_slurm(passes, options)
    executor_class = {"local": _LocalExecutor, "ray": _RayExecutor}[options.executor]
    for one in passes:
        logging_dir = f"{options.job.url}/executor-{one.name}"
        with _progress(one, options):
            executor_class(one.steps, one.num_tasks, options.workers, logging_dir=logging_dir).run()
    return True


@contextmanager
def _progress(one: Pass, options: JobOptions) -> Iterator[None]:
    """Show how far a pass is while the body runs: in stored bytes of the input or, if it reads no files, documents."""
    total_bytes = 0
    if one.reads_input:
        total_bytes = sum(stored_bytes_of_task(options, rank, one.num_tasks) for rank in range(one.num_tasks))
    key, unit = ("bytes_read", "B") if total_bytes else ("documents", "doc")

    def show():
        tasks = options.job.read_all(f"progress-{one.name}")
        bar.n = sum(task[key] for task in tasks)
        bar.set_postfix_str(f"{sum(task['documents'] for task in tasks):,} documents")

    with progress_bar(desc=one.name, total=total_bytes or None, unit=unit, unit_scale=True, smoothing=0.05) as bar:
        try:
            with repeating(show, every_seconds=1.0):
                yield
        finally:
            show()


def _plan_passes(options: JobOptions) -> list[Pass]:
    """All passes of the job with all their steps; the last one tokenizes."""
    filters: list[Step] = []
    passes: list[Pass] = []

    def readers(name_of_pass: str) -> list[Step]:
        # Copies, since datatrove's steps keep statistics.
        return [partial(read_documents, options, name_of_pass), *deepcopy(filters)]

    if options.files_to_avoid:
        filters += [partial(drop_contaminated, options), partial(count_documents, options.job, "decontaminate")]
    for kind in options.dedup:
        finding, dedup_filter = DEDUPLICATIONS[kind](options, readers)
        passes += finding
        filters += [dedup_filter, partial(count_documents, options.job, kind)]
    return [*passes, Pass("tokenizing", [*readers("tokenizing"), partial(write_shards, options)], options.num_tasks)]


class _LocalExecutor(LocalPipelineExecutor):
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


class _RayExecutor(RayPipelineExecutor):
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
            run_task = ray.remote(num_cpus=1, max_retries=_MOST_RESTARTS_OF_A_TASK)(PipelineExecutor._run_for_rank)
            executor = ray.put(self)
            while waiting or running:
                while waiting and len(running) < self.workers:
                    running.append(run_task.remote(executor, waiting.popleft(), local_rank=1))
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


def _submit_to_slurm(passes: list[Pass], options: JobOptions) -> bool:
    """Submit the passes that are not done, each to start after the one before. Returns whether all were done."""
    job = options.job
    if not shutil.which("sbatch"):
        raise InputError("--executor slurm finds no sbatch: run it on a machine of the cluster that can submit jobs")
    before = job.read("slurm.json")
    if before:
        slurm_job = before["slurm_job"]
        queue = subprocess.run(["squeue", "--noheader", "--jobs", slurm_job], capture_output=True, text=True)
        if queue.stdout.strip():  # Slurm forgets ended jobs, and then ends with an error
            raise UserError(
                f"Slurm job {slurm_job} still works on {job.output}: wait until it has left the queue, or "
                f"scancel {slurm_job}"
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
