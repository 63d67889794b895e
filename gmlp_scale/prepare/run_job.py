"""The passes of a tokenizing job, in order: decontamination, deduplication, then tokenizing into shards."""

import shutil
from copy import deepcopy
from dataclasses import replace
from functools import partial

from datatrove.pipeline.base import PipelineStep

from gmlp_scale.errors import InputError, UserError
from gmlp_scale.prepare.dedup import DEDUPLICATIONS, CountDocuments, DropContaminated, Pass
from gmlp_scale.prepare.executors import LocalExecutor, RayExecutor, is_in_slurm_queue, slurm_executor
from gmlp_scale.prepare.job_folder import JobFolder
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.progress import job_progress
from gmlp_scale.prepare.read_documents import ReadDocuments, ReadHubDataset, inputs_of_task
from gmlp_scale.prepare.write_shards import WriteShards


def run_passes(options: JobOptions, job: JobFolder) -> bool:
    """Run every task that is not done, or submit them to Slurm. Returns whether all are done now."""
    passes = _plan_passes(options, job)
    if options.executor == "slurm":
        return _submit(passes, options, job)
    executor_class = {"local": LocalExecutor, "ray": RayExecutor}[options.executor]
    for one in passes:
        executor = executor_class(
            one.steps, one.num_tasks, options.workers, logging_dir=f"{job.url}/executor-{one.name}"
        )
        with job_progress(one.name, _bytes_to_read(one, options), partial(job.read_all, f"progress-{one.name}")):
            executor.run()
    return True


def _bytes_to_read(one: Pass, options: JobOptions) -> int:
    """The stored bytes that the pass reads; 0 if it reads no files. Each part of a file reads the whole file."""
    if not one.reads_documents or not options.files:
        return 0
    inputs = (inputs_of_task(options.files, rank, one.num_tasks) for rank in range(one.num_tasks))
    return sum(file.num_bytes for task in inputs for file, _, _ in task)


def _submit(passes: list[Pass], options: JobOptions, job: JobFolder) -> bool:
    """Submit the passes that are not done, each to start after the one before. Returns whether all were done."""
    if not shutil.which("sbatch"):
        raise InputError("--executor slurm finds no sbatch: run it on a machine of the cluster that can submit jobs")
    before = job.read("slurm.json")
    if before and is_in_slurm_queue(before["slurm_job"]):
        raise UserError(
            f"Slurm job {before['slurm_job']} still works on {job.output}: wait until it has left the queue, or "
            f"scancel {before['slurm_job']}"
        )
    executor = None
    for one in passes:
        executor = slurm_executor(one, options, f"{job.url}/executor-{one.name}", depends=executor)
    if not executor.get_incomplete_ranks():
        return True
    executor.run()
    job.write("slurm.json", {"slurm_job": str(executor.job_id)})
    return False


def _plan_passes(options: JobOptions, job: JobFolder) -> list[Pass]:
    """All passes of the job with all their steps; the last one tokenizes."""
    filters: list[PipelineStep] = []
    passes: list[Pass] = []
    if options.decontaminate:
        filters += [DropContaminated(options), CountDocuments(job, "decontaminate")]
    for kind in options.dedup:
        finding, dedup_filter = DEDUPLICATIONS[kind](job, options.num_tasks)
        passes += [_with_reader(one, filters, options, job) for one in finding]
        filters += [dedup_filter, CountDocuments(job, kind)]
    last = Pass("tokenizing", [WriteShards(options, job)], options.num_tasks, reads_documents=True)
    return [*passes, _with_reader(last, filters, options, job)]


def _with_reader(one: Pass, filters: list[PipelineStep], options: JobOptions, job: JobFolder) -> Pass:
    """The pass with a reader and the filters in front; copies of them, since datatrove's steps keep statistics."""
    if not one.reads_documents:
        return one
    reader_class = ReadHubDataset if options.hub_data_set else ReadDocuments
    return replace(one, steps=[reader_class(options, job, f"progress-{one.name}"), *deepcopy(filters), *one.steps])
