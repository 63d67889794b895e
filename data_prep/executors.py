"""Running the tasks of a pipeline: on this machine or a Ray cluster with a progress bar, or as Slurm job arrays."""

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep
from tqdm import tqdm

from data_prep.job_folder import JobError, JobFolder

_MOST_RESTARTS_OF_A_TASK = 5


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's executor over a pool that notices a killed worker, where multiprocessing's would wait for ever.

    Its workers end when the job's own process does, so that a killed job leaves nothing running.
    """

    def run(self) -> None:
        """Run the tasks that have no completion mark. Raises JobError where a worker was killed."""
        pool = ProcessPoolExecutor(self.workers, mp_context=get_context("forkserver"), initializer=_start_worker)
        try:
            tasks = [pool.submit(self._run_for_rank, rank, local_rank=1) for rank in self.get_incomplete_ranks()]
            for task in as_completed(tasks):
                task.result()
        except BrokenProcessPool as error:
            raise JobError(
                "a worker was killed, perhaps for want of memory (try fewer --workers); the same command again goes "
                "on with the tasks that are not done"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Be quiet, since the task's log and the error that reaches the job say it all, and end when the job has ended."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def watch():
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class RayExecutor(RayPipelineExecutor):
    """datatrove's executor with Ray's plain tasks for its actors: a task whose process or machine is lost starts again
    elsewhere, where the actors' pool waits for a killed process for ever."""

    _run_for_rank = PipelineExecutor._run_for_rank  # Ray's own logs in one folder of /tmp for all users and jobs

    def run(self) -> None:
        """Run the tasks that have no completion mark. Raises JobError where there is no cluster or it gives up."""
        try:
            import ray
        except ImportError as error:
            raise JobError("--executor ray needs the package ray: pip install ray") from error
        waiting, running = deque(self.get_incomplete_ranks()), []
        if not waiting:
            return
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
        except ConnectionError as error:
            raise JobError("--executor ray finds no cluster: run `ray start`, or set RAY_ADDRESS") from error
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
            raise JobError(
                f"Ray gave a task up ({type(error).__name__}); the same command again goes on with the tasks that are "
                "not done"
            ) from error
        finally:
            ray.shutdown()


def _run_ray_task(executor: RayExecutor, rank: int) -> None:
    executor._run_for_rank(rank, local_rank=1)


def slurm_executor(
    steps: list[PipelineStep],
    num_tasks: int,
    workers: int,
    logging_dir: str,
    *,
    partition: str,
    time_limit: str,
    depends: SlurmPipelineExecutor | None,
) -> SlurmPipelineExecutor:
    """A job array of the tasks that have no completion mark, which starts after `depends`; its `run` submits both."""
    return SlurmPipelineExecutor(
        steps,
        num_tasks,
        time_limit,
        partition,
        workers=workers,
        logging_dir=logging_dir,
        depends=depends,
        job_name=logging_dir.rsplit("/", 1)[-1].removeprefix("executor-"),
        env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
        qos=None,
    )


def is_in_slurm_queue(slurm_job: str) -> bool:
    """Whether a job that was submitted has not ended."""
    listing = subprocess.run(["squeue", "--noheader", "--jobs", slurm_job], capture_output=True, text=True)
    return bool(listing.stdout.strip())  # Slurm forgets ended jobs, and then ends with an error


@contextmanager
def progress_bar(job: JobFolder, folder: str, description: str, total_bytes: int) -> Iterator[None]:
    """Show the sum of the tasks' progress while the body runs: of the input's stored bytes, or of documents."""
    done = threading.Event()
    key, unit = ("bytes_read", "B") if total_bytes else ("documents", "doc")
    bar = tqdm(desc=description, total=total_bytes or None, unit=unit, unit_scale=True, smoothing=0.05, file=sys.stderr)

    def follow():
        while not done.wait(1.0):
            _show(bar, job.read_all(folder), key)

    thread = threading.Thread(target=follow, name="progress")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _show(bar, job.read_all(folder), key)
        bar.close()


def _show(bar: tqdm, tasks: list[dict], key: str) -> None:
    bar.n = sum(task.get(key, 0) for task in tasks)
    bar.set_postfix_str(f"{sum(task.get('documents', 0) for task in tasks):,} documents")
