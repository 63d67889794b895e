"""Assembles a finetuning run from its config, resumes it where it was left, trains, scores and writes predictions.

The parts are pretraining's: engine, loop, checkpoints, metrics. A run folder holds, beside theirs,
    best/, last/          exports with the head: of the evaluation with the best dev score, and of the end
    predictions/PART/     in the official form, of the last weights
    scores.json           written last: the run is done
"""

import logging
import time
from contextlib import ExitStack
from functools import partial

import torch
from torch import nn

from gmlp_scale.config import ConfigError, check_unchanged, schedule_mistakes
from gmlp_scale.data.epoch_loader import EpochLoader
from gmlp_scale.engine import Engine, build_engine
from gmlp_scale.engine.optimizer import OptimizerConfig, build_adamw, decayed_names
from gmlp_scale.export.folder import Export, ExportError
from gmlp_scale.finetune.config import FREE_ON_RESUME, FinetuneConfig
from gmlp_scale.finetune.finetuning import Results
from gmlp_scale.finetune.inputs import Inputs
from gmlp_scale.models import build_model
from gmlp_scale.run import USER_ERRORS as PRETRAIN_USER_ERRORS
from gmlp_scale.tasks.records import DataError
from gmlp_scale.train.checkpoint import Checkpoint
from gmlp_scale.train.checkpointer import Checkpointer
from gmlp_scale.train.loop import train
from gmlp_scale.train.metrics import Metrics, peak_tflops
from gmlp_scale.train.run_folder import claimed, describe_data_change, write_text
from gmlp_scale.train.start_up import StartUp
from gmlp_scale.world import World

log = logging.getLogger(__name__)

USER_ERRORS = (*PRETRAIN_USER_ERRORS, DataError, ExportError)

_HEADS = ("classifier.", "spans.")


def finetune(run: FinetuneConfig, inputs: Inputs, world: World) -> dict | None:
    """Trains to the end of the schedule, `train.stop_after_step` or a stop signal, from the newest good checkpoint.

    Returns the content of scores.json, or None where it stopped before the end.

    Raises:
        One of USER_ERRORS.
    """
    start_up = StartUp(since=time.perf_counter())
    with ExitStack() as stack:
        num_rows = inputs.rows["train"].num_rows
        check_schedule(run, num_rows, world.size)
        world.on_main(lambda: stack.enter_context(claimed(run.run_dir)))
        config, optimizer = run.train_config(num_rows), run.optimizer_config(num_rows)
        loader = EpochLoader(
            inputs.rows["train"],
            seed=run.seed,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            rank=world.rank,
            world_size=world.size,
        )
        checkpointer = Checkpointer(
            run.run_dir / "checkpoints",
            run.checkpoint,
            rank=world.rank,
            world_size=world.size,
            broadcast=world.broadcast,
        )
        stack.callback(checkpointer.close)
        details = {"config": run.model_dump(mode="json"), "data": inputs.fingerprint}
        checkpoint = checkpointer.newest()
        if checkpoint:
            check_continues(run, str(checkpoint.path), checkpoint.details, details)
        world.on_main(lambda: write_text(run.run_dir / "config.yaml", run.to_yaml()))

        engine = build_engine_of(run, optimizer, inputs.export, world, is_new=checkpoint is None)
        stack.callback(engine.close)
        start_step = _resume(checkpoint, engine)
        start_up.finish("model and engine")
        metrics = _build_metrics(run, inputs, world, config.num_steps, start_step)
        stack.callback(metrics.close)
        start_up.finish("metrics")
        results = Results(run, inputs, engine, world, start_step)
        progress = train(
            config,
            optimizer,
            world=world,
            engine=engine,
            loader=loader,
            checkpointer=checkpointer,
            save_every_steps=run.checkpoint.save_every_steps,
            details=details,
            metrics=metrics,
            evaluate=results.evaluate,
            start_step=start_step,
            seed=run.seed,
            start_up=start_up,
        )
        if not progress.finished:
            log.info("stopped after step %d of %d; the same command resumes", progress.step, config.num_steps)
            return None
        scores = results.write(progress.step)
        log.info("finished at step %d: %s", progress.step, run.run_dir)
        return scores


def check_schedule(run: FinetuneConfig, num_rows: int, world_size: int) -> None:
    """Raises ConfigError where the steps that the data give, or the ranks, do not fit the recipe."""
    run.num_micro_batches(world_size)
    train, num_steps = run.train, run.num_steps(num_rows)
    mistakes = schedule_mistakes(train.global_batch_size, train.micro_batch_size, train.stop_after_step, num_steps)
    if mistakes := list(mistakes):
        raise ConfigError(run.name, mistakes)
    if run.engine.kind == "single" and world_size > 1:
        found = f"found single with {world_size} ranks; use zero or fsdp2, or start one"
        raise ConfigError(run.name, [f"engine.kind: {found}"])


def check_continues(run: FinetuneConfig, place: str, before: dict, now: dict) -> None:
    """Raises ConfigError with every difference that would make this another run than the one at `place`."""
    allowed = (*FREE_ON_RESUME, *run.train.allow_changed_on_resume)
    differences = check_unchanged(before["config"], now["config"], allowed)
    differences += describe_data_change(before["data"], now["data"])
    if differences:
        differences.append("give the run another name=..., or the old values and data")
        raise ConfigError(f"{place} belongs to another run", differences)


def _resume(checkpoint: Checkpoint | None, engine: Engine) -> int:
    if checkpoint is None:
        return 0
    checkpoint.load_into(engine)
    log.info("resuming from %s", checkpoint.path)
    return checkpoint.step


def build_engine_of(
    run: FinetuneConfig, optimizer: OptimizerConfig, export: Export, world: World, *, is_new: bool
) -> Engine:
    """The engine of a run; its weights are left to the checkpoint unless `is_new`."""
    model = build_model(export.model, head=run.task_row.head, dropout=run.dropout)
    if is_new:
        initialise(model, export, seed=run.seed, pretrained=run.pretrained)
    return build_engine(
        model,
        run.engine,
        world,
        build_optimizer=partial(build_adamw, config=optimizer, decayed=decayed_names(model)),
        precision=run.train.precision,
        num_micro_batches=run.num_micro_batches(world.size),
        micro_batch_size=run.train.micro_batch_size,
        gradient_clipping=run.optimizer.gradient_clipping,
        compile=run.train.compile,
        recompute=run.train.recompute,
    )


@torch.no_grad()
def initialise(model: nn.Module, export: Export, *, seed: int, pretrained: bool) -> None:
    """Random weights by the seed; then, if `pretrained`, the export's for the trunk, whatever head it had."""
    model.init_weights(torch.Generator().manual_seed(seed))
    if pretrained:
        for name, parameter in model.named_parameters():
            if not name.startswith(_HEADS):
                parameter.copy_(export.weights[name])


def flops_per_step(run: FinetuneConfig, export: Export) -> int:
    """Training FLOPs of one global batch: 3 x the forward pass at the length of the rows."""
    with torch.device("meta"):
        shortened = export.model.model_copy(update={"sequence_length": run.data.sequence_length})
        model = build_model(shortened, head=run.task_row.head)
    return 3 * model.flops_per_sample() * run.train.global_batch_size


def _build_metrics(run: FinetuneConfig, inputs: Inputs, world: World, num_steps: int, start_step: int) -> Metrics:
    return Metrics(
        run.run_dir,
        world,
        start_step=start_step,
        num_steps=num_steps,
        tokens_per_step=run.tokens_per_step,
        rows_per_step=run.train.global_batch_size,
        rows_per_epoch=inputs.rows["train"].num_rows,
        flops_per_step=flops_per_step(run, inputs.export),
        peak_tflops_per_device=run.train.peak_tflops_per_device or peak_tflops(world.device, run.train.precision),
    )
