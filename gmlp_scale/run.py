"""Assembles a pretraining run from its config, resumes it where it was left, and trains.

This is the one place where the eight nouns meet: RunConfig, World, Loader (of Batches), Model, Engine, Checkpointer,
and the loop. load_pretrained() gives the trained model of a run folder to evaluation and export.
"""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gmlp_scale import IMPORTED_AT_SECONDS
from gmlp_scale.config import ConfigError, RunConfig, check_unchanged, load_run_config
from gmlp_scale.data.loader import Loader
from gmlp_scale.data.shards import ShardError
from gmlp_scale.engine import Engine, EngineConfigError, build_engine
from gmlp_scale.engine.optimizer import build_adamw, decayed_names
from gmlp_scale.kernels.spatial_gating_unit import KernelsError
from gmlp_scale.models import build_model, with_kernels
from gmlp_scale.plan.describe import count_parameters, flops_per_step
from gmlp_scale.plan.micro_batch import largest_micro_batch_size
from gmlp_scale.train.checkpoint import Checkpoint, CheckpointError, folder_name, newest_checkpoint
from gmlp_scale.train.checkpointer import Checkpointer
from gmlp_scale.train.evaluate import evaluate
from gmlp_scale.train.loop import NotFiniteError, Progress, train
from gmlp_scale.train.metrics import Metrics, peak_tflops
from gmlp_scale.train.run_folder import RunFolderError, claimed, describe_data_change, write_text
from gmlp_scale.train.start_up import StartUp
from gmlp_scale.world import DeviceError, OtherRankError, World, set_up_logging, start_world

log = logging.getLogger(__name__)

USER_ERRORS = (
    ConfigError,
    EngineConfigError,
    ShardError,
    OSError,
    RunFolderError,
    CheckpointError,
    NotFiniteError,
    DeviceError,
    OtherRankError,
    KernelsError,
)
"""What a user can put right: each is one message that says what was found, what is needed and what to change."""


def pretrain(run: RunConfig) -> Progress:
    """Trains to the end of the schedule, `train.stop_after_step` or a stop signal, from the newest good checkpoint.

    Raises:
        One of USER_ERRORS: the recipe does not fit the ranks, the shards or the checkpoint; another job holds the run
        folder; a shard is corrupt; no checkpoint can be written or read; a loss or norm is not finite.
    """
    start_up = StartUp(since=IMPORTED_AT_SECONDS)
    start_up.finish("imports")
    with ExitStack() as stack:
        needs_group = run.engine.kind != "single"
        world = stack.enter_context(start_world(run.engine.timeout_seconds, run.train.device, init_group=needs_group))
        set_up_logging(world)
        start_up.finish("process group")
        run.rows_per_rank(world.size)
        world.on_main(lambda: stack.enter_context(claimed(run.run_dir)))
        recipe = run.to_yaml()
        if run.train.micro_batch_size == "auto":
            run = run.with_micro_batch_size(largest_micro_batch_size(run, world))
            start_up.finish("micro-batch")
        loader = build_loader(run, rank=world.rank, world_size=world.size)
        stack.callback(loader.close)
        if not loader.manifest.num_rows("heldout"):
            raise ShardError(f"{run.data.shards} has no held-out rows to evaluate on: write it with --heldout-fraction")
        start_up.finish("data")
        checkpointer = Checkpointer(
            run.run_dir / "checkpoints",
            run.checkpoint,
            rank=world.rank,
            world_size=world.size,
            broadcast=world.broadcast,
            timeout_seconds=run.engine.timeout_seconds / 2,
        )
        stack.callback(checkpointer.close)
        details = {"config": run.model_dump(mode="json"), "data": loader.fingerprint()}
        checkpoint = checkpointer.newest()
        if checkpoint:
            _check_continues(run, checkpoint, details)
        start_up.finish("checkpoint")
        world.on_main(lambda: write_text(run.run_dir / "config.yaml", recipe))

        num_parameters, engine_name = count_parameters(run), run.engine.kind
        log.info("%s: %s parameters, engine %s, ranks: %d", run.name, f"{num_parameters:,}", engine_name, world.size)
        engine = build_engine_of(run, world, is_new=checkpoint is None)
        stack.callback(engine.close)
        start_up.finish("model and engine")
        if checkpoint:
            checkpoint.load_into(engine)
            start_up.finish("checkpoint")
            log.info("resuming from %s", checkpoint.path)
        start_step = checkpoint.step if checkpoint else 0
        metrics = _build_metrics(run, world, loader, start_step)
        stack.callback(metrics.close)
        start_up.finish("metrics")

        def evaluate_heldout(step: int) -> dict[str, float]:
            batches = loader.heldout_batches(run.train.num_evaluation_rows)
            return evaluate(engine.predict, batches, world).by_tag()

        progress = train(
            run.train,
            run.optimizer,
            world=world,
            engine=engine,
            loader=loader,
            checkpointer=checkpointer,
            save_every_steps=run.checkpoint.save_every_steps,
            details=details,
            metrics=metrics,
            evaluate=evaluate_heldout,
            start_step=start_step,
            seed=run.seed,
            start_up=start_up,
        )
        if progress.finished:
            log.info("finished at step %d: %s", progress.step, run.run_dir)
        else:
            log.info("stopped after step %d of %d; the same command resumes", progress.step, run.train.num_steps)
        return progress


def load_pretrained(run_dir: Path, step: int | None = None) -> tuple[RunConfig, Checkpoint, nn.Module]:
    """The model of a run folder's newest good checkpoint, or of that after `step`: float32, on the CPU."""
    run = load_run_config(run_dir / "config.yaml")
    if step is None:
        checkpoint, _ = newest_checkpoint(run_dir / "checkpoints")
    else:
        checkpoint = Checkpoint.open(run_dir / "checkpoints" / folder_name(step))
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no complete checkpoint: train the run first")
    if run.train.micro_batch_size == "auto":
        run = run.with_micro_batch_size(checkpoint.details["config"]["train"]["micro_batch_size"])
    model = build_model(with_kernels(run.model, "auto"))  # where it was trained, there may have been a GPU
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.read(f"model.{name}"))
    return run, checkpoint, model.eval()


def build_loader(run: RunConfig, *, rank: int, world_size: int) -> Loader:
    """The run's loader for one rank of `world_size`."""
    return Loader(
        run.data,
        sequence_length=run.model.sequence_length,
        vocab_size=run.model.vocab_size,
        seed=run.seed,
        global_batch_size=run.train.global_batch_size,
        micro_batch_size=run.train.micro_batch_size,
        rank=rank,
        world_size=world_size,
        run_dir=run.run_dir,
    )


def _check_continues(run: RunConfig, checkpoint: Checkpoint, details: dict) -> None:
    """Raises ConfigError with every difference that would make this another run than the checkpoint's."""
    before, allowed = checkpoint.details, run.train.allow_changed_on_resume
    differences = check_unchanged(before["config"], details["config"], allowed)
    differences += describe_data_change(before["data"], details["data"])
    if differences:
        differences.append(
            "give the run another name=..., or the old values; train.allow_changed_on_resume lists what may differ"
        )
        raise ConfigError(f"{checkpoint.path} belongs to another run", differences)
    for field in allowed:
        log.warning("%s may differ from the checkpoint's (train.allow_changed_on_resume)", field)


def build_engine_of(run: RunConfig, world: World, *, is_new: bool) -> Engine:
    """The engine of a run; its weights are left to the checkpoint unless `is_new`."""
    model = build_model(run.model)
    if is_new:
        model.init_weights(torch.Generator().manual_seed(run.seed))
    return build_engine(
        model,
        run.engine,
        world,
        build_optimizer=partial(build_adamw, config=run.optimizer, decayed=decayed_names(model)),
        precision=run.train.precision,
        num_micro_batches=run.num_micro_batches(world.size),
        micro_batch_size=run.train.micro_batch_size,
        gradient_clipping=run.optimizer.gradient_clipping,
        compile=run.train.compile,
        recompute=run.train.recompute,
    )


def _build_metrics(run: RunConfig, world: World, loader: Loader, start_step: int) -> Metrics:
    return Metrics(
        run.run_dir,
        world,
        start_step=start_step,
        num_steps=run.train.num_steps,
        tokens_per_step=run.tokens_per_step,
        rows_per_step=run.train.global_batch_size,
        rows_per_epoch=loader.rows,
        flops_per_step=flops_per_step(run),
        peak_tflops_per_device=run.train.peak_tflops_per_device or peak_tflops(world.device, run.train.precision),
    )
