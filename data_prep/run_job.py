"""The passes of a tokenizing job, in order: decontamination, deduplication, then tokenizing into shards."""

import argparse
from copy import deepcopy
from dataclasses import replace

from datatrove.pipeline.base import PipelineStep

from data_prep.dedup import DEDUPLICATIONS, CountDocuments, DropContaminated, Pass
from data_prep.executors import LocalExecutor, RayExecutor, is_in_slurm_queue, progress_bar, slurm_executor
from data_prep.input_files import InputFile, find_inputs
from data_prep.job_folder import JobError, JobFolder
from data_prep.read_documents import ReadDocuments, ReadHubDataset, inputs_of_task
from data_prep.write_shards import WriteShards


def run_passes(options: argparse.Namespace, files: list[InputFile], num_tasks: int, job: JobFolder) -> bool:
    """Run every task that is not done, or submit them to Slurm; whether all are done now.

    `options` are those of tokenize_corpus.py; no `files` means a data set of the hub.
    """
    passes = _plan_passes(options, files, num_tasks, job)
    if options.executor == "slurm":
        return _submit(passes, options, job)
    executor_class = {"local": LocalExecutor, "ray": RayExecutor}[options.executor]
    for one in passes:
        executor = executor_class(
            one.steps, one.num_tasks, options.workers, logging_dir=f"{job.url}/executor-{one.name}"
        )
        planned = [inputs_of_task(files, rank, one.num_tasks) for rank in range(one.num_tasks)] if files else []
        total_bytes = sum(file.num_bytes for task in planned for file, _, _ in task)
        with progress_bar(job, f"progress-{one.name}", one.name, total_bytes if one.reads_documents else 0):
            executor.run()
    return True


def _submit(passes: list[Pass], options: argparse.Namespace, job: JobFolder) -> bool:
    """Submit the passes that are not done, each to start after the one before; whether there was nothing to submit."""
    before = job.read("slurm.json")
    if before and is_in_slurm_queue(before["slurm_job"]):
        raise JobError(
            f"Slurm job {before['slurm_job']} still works on {job.output}: wait until it has left the queue, or "
            f"scancel {before['slurm_job']}"
        )
    executor = None
    for one in passes:
        executor = slurm_executor(
            one.steps,
            one.num_tasks,
            options.workers,
            f"{job.url}/executor-{one.name}",
            partition=options.slurm_partition,
            time_limit=options.slurm_time,
            depends=executor,
        )
    if not executor.get_incomplete_ranks():
        return True
    executor.run()
    job.write("slurm.json", {"slurm_job": str(executor.job_id)})
    return False


def _plan_passes(options: argparse.Namespace, files: list[InputFile], num_tasks: int, job: JobFolder) -> list[Pass]:
    """All passes of the job with all their steps; the last tokenizes."""
    filters: list[PipelineStep] = []
    passes: list[Pass] = []
    if options.decontaminate:
        texts = find_inputs(options.decontaminate, "--decontaminate")
        step = DropContaminated(texts, text_field=options.text_field, max_record_bytes=options.max_record_bytes)
        filters += [step, CountDocuments(job, "decontaminate")]
    for kind in options.dedup:
        finding, dedup_filter = DEDUPLICATIONS[kind](job, num_tasks)
        passes += [_with_reader(one, filters, options, files, job) for one in finding]
        filters += [dedup_filter, CountDocuments(job, kind)]
    writer = WriteShards(
        options.tokenizer,
        job,
        sequence_length=options.sequence_length,
        packing=options.packing,
        heldout_fraction=options.heldout_fraction,
        shard_bytes=options.shard_bytes,
    )
    last = Pass("tokenizing", [writer], num_tasks, reads_documents=True)
    return [*passes, _with_reader(last, filters, options, files, job)]


def _with_reader(
    one: Pass, filters: list[PipelineStep], options: argparse.Namespace, files: list[InputFile], job: JobFolder
) -> Pass:
    """The pass with what brings it its documents; copies, since datatrove's steps keep statistics of their own."""
    if not one.reads_documents:
        return one
    reader = _make_reader(options, files, job, f"progress-{one.name}")
    return replace(one, steps=[reader, *deepcopy(filters), *one.steps])


def _make_reader(
    options: argparse.Namespace, files: list[InputFile], job: JobFolder, progress: str
) -> ReadDocuments | ReadHubDataset:
    if not files:
        name = options.input[0].removeprefix("hf:")
        return ReadHubDataset(name, job, progress=progress, text_field=options.text_field)
    return ReadDocuments(
        files,
        job,
        progress=progress,
        text_field=options.text_field,
        max_record_bytes=options.max_record_bytes,
        max_bad_fraction=options.max_bad_fraction,
    )
