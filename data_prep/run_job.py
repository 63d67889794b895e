"""The passes of a tokenizing job, in order: decontamination, deduplication, then tokenizing into shards."""

import argparse

from datatrove.pipeline.base import PipelineStep

from data_prep.dedup import DEDUPLICATIONS, CountDocuments, DropContaminated, Pass
from data_prep.executors import LocalExecutor, progress_bar
from data_prep.job_folder import JobFolder
from data_prep.read_documents import ReadDocuments, ReadHubDataset, inputs_of_task
from data_prep.sources import InputFile, find_inputs
from data_prep.write_shards import WriteShards


def run_passes(options: argparse.Namespace, files: list[InputFile], num_tasks: int, job: JobFolder) -> None:
    """Run every task that is not done. `options` are those of tokenize_corpus.py; no `files` means a hub data set."""
    filters: list[PipelineStep] = []
    if options.decontaminate:
        texts = find_inputs(options.decontaminate, "--decontaminate")
        step = DropContaminated(texts, text_field=options.text_field, max_record_bytes=options.max_record_bytes)
        filters += [step, CountDocuments(job, "decontaminate")]
    for kind in options.dedup:
        passes, dedup_filter = DEDUPLICATIONS[kind](job, num_tasks)
        for one in passes:
            _run_pass(one, filters, options, files, job)
        filters += [dedup_filter, CountDocuments(job, kind)]
    writer = WriteShards(
        options.tokenizer,
        job,
        sequence_length=options.sequence_length,
        packing=options.packing,
        heldout_fraction=options.heldout_fraction,
        shard_bytes=options.shard_bytes,
    )
    _run_pass(Pass("tokenizing", [writer], num_tasks, reads_documents=True), filters, options, files, job)


def _run_pass(
    one: Pass, filters: list[PipelineStep], options: argparse.Namespace, files: list[InputFile], job: JobFolder
) -> None:
    progress = f"progress-{one.name}"
    before = [_make_reader(options, files, job, progress), *filters] if one.reads_documents else []
    executor = LocalExecutor(
        [*before, *one.steps], one.num_tasks, options.workers, logging_dir=f"{job.url}/executor-{one.name}"
    )
    planned = [inputs_of_task(files, rank, one.num_tasks) for rank in range(one.num_tasks)] if files and before else []
    with progress_bar(job, progress, one.name, sum(file.num_bytes for task in planned for file, _, _ in task)):
        executor.run()


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
