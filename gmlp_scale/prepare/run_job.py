"""The passes of a tokenizing job, in order: decontamination, deduplication, then tokenizing into shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

from datatrove.pipeline.base import PipelineStep

from gmlp_scale.distributed.logs import progress_bar
from gmlp_scale.prepare.dedup import DEDUPLICATIONS, CountDocuments, DropContaminated, Pass
from gmlp_scale.prepare.executors import LocalExecutor, RayExecutor, submit_to_slurm
from gmlp_scale.prepare.job_options import JobOptions
from gmlp_scale.prepare.read_documents import ReadDocuments, stored_bytes_of_task
from gmlp_scale.prepare.write_shards import WriteShards
from gmlp_scale.storage.claim import repeating


def run_passes(options: JobOptions) -> bool:
    """Run every task that is not done, or submit them to Slurm. Returns whether all are done now."""
    passes = _plan_passes(options)
    if options.executor == "slurm":
        return submit_to_slurm(passes, options)
    executor_class = {"local": LocalExecutor, "ray": RayExecutor}[options.executor]
    for one in passes:
        logging_dir = f"{options.job.url}/executor-{one.name}"
        with _progress(one, options):
            executor_class(one.steps, one.num_tasks, options.workers, logging_dir=logging_dir).run()
    return True


@contextmanager
def _progress(one: Pass, options: JobOptions) -> Iterator[None]:
    """Show how far a pass is while the body runs: in stored bytes of the input or, if it reads no files, documents."""
    total_bytes = 0
    if one.reads_documents:
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
    filters: list[PipelineStep] = []
    passes: list[Pass] = []
    if options.decontaminate:
        filters += [DropContaminated(options), CountDocuments(options.job, "decontaminate")]
    for kind in options.dedup:
        finding, dedup_filter = DEDUPLICATIONS[kind](options)
        passes += [_with_reader(one, filters, options) for one in finding]
        filters += [dedup_filter, CountDocuments(options.job, kind)]
    last = Pass("tokenizing", [WriteShards(options)], options.num_tasks, reads_documents=True)
    return [*passes, _with_reader(last, filters, options)]


def _with_reader(one: Pass, filters: list[PipelineStep], options: JobOptions) -> Pass:
    """The pass with a reader and the filters in front; copies of them, since datatrove's steps keep statistics."""
    if not one.reads_documents:
        return one
    return replace(one, steps=[ReadDocuments(options, one.name), *deepcopy(filters), *one.steps])
