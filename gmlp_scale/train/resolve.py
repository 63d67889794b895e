"""Decides what a recipe leaves open, before anything of the run opens: `resolve(recipe, world) -> recipe`.

Afterwards `train.precision` and `train.micro_batch_size` are not `auto`, and an `init_from` of RUN names a step. A run
that was started before keeps what its first start decided, and a branch keeps what its trunk's first start decided.
"""

from typing import Any

from gmlp_scale.checkpoint.stores import saved_steps
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import SHARDED_KINDS
from gmlp_scale.plan.auto import faster_precision, largest_micro_batch_size
from gmlp_scale.recipe.config import AnyPretraining, ConfigError, RunConfig, split_step
from gmlp_scale.recipe.reader import read_recipe_file
from gmlp_scale.storage.files import read_file, redacted
from gmlp_scale.tasks.pretraining import with_newest_step


def resolve(run: AnyPretraining, world: World) -> AnyPretraining:
    """`run` with every decision made. All ranks call it together; rank 0 decides.

    Raises:
        ConfigError: the recipe does not fit the ranks, or a field cannot be decided. It names what to change.
        TrainedModelError, CheckpointError: on rank 0, naming what is wrong with init_from's RUN.
        OtherRankError: on the ranks where nothing is wrong.
    """
    run.rows_per_rank(world.size)
    run = with_decided_precision(run, world)
    if isinstance(run, RunConfig):
        run = with_decided_micro_batch(with_decided_start(run, world), world)
    return run


def with_decided_precision(run: AnyPretraining, world: World) -> AnyPretraining:
    """`run` with float32 or bf16. A GPU takes bf16 if it has it; on a CPU a block is timed."""
    if run.train.precision != "auto":
        return run

    def decide() -> str:
        return (_first_start(run) or {"train": {}})["train"].get("precision") or faster_precision(run, world.device)

    return run.with_train(precision=world.on_main(decide))


def with_decided_start(run: RunConfig, world: World) -> RunConfig:
    """`run` with RUN@STEP in place of an init_from of RUN.

    RUN may save meanwhile, and then each rank would see another newest checkpoint. Once the run has a checkpoint, its
    own record counts: whether it agrees is checked when the run resumes.
    """
    if run.init_from is None or split_step(run.init_from)[1] is not None:
        return run

    def decide() -> str:
        first = _first_start(run, with_checkpoint=True)
        if first is None:
            return with_newest_step(run.init_from)
        recorded = first.get("init_from")
        is_same = recorded and split_step(recorded)[0] == redacted(run.init_from)
        return recorded if is_same else run.init_from

    return run.model_copy(update={"init_from": world.on_main(decide)})


def with_decided_micro_batch(run: RunConfig, world: World) -> RunConfig:
    """`run` with the largest micro-batch that fits into the memory of every rank."""
    if run.train.micro_batch_size != "auto":
        return run
    num_rows = largest_micro_batch_size(run, world)
    if not num_rows:
        found = "found auto, but not one row fits"
        more_ranks = f"more ranks with engine.kind {SHARDED_KINDS}"
        needed = f"train.recompute=full, more memory, or {more_ranks}"
        raise ConfigError(run.name, [f"train.micro_batch_size: {found}; needed: {needed}"])
    return run.with_train(micro_batch_size=num_rows)


def _first_start(run: AnyPretraining, with_checkpoint: bool = False) -> dict[str, Any] | None:
    """The config.yaml of the run or, if there is none, of the run that it branches off; None for a new run."""
    trunk = [split_step(run.branch_from)[0]] if run.branch_from else []
    for folder in [run.run_folder, *trunk]:
        try:
            read_file(f"{folder}/config.yaml")
        except FileNotFoundError:
            continue
        if not with_checkpoint or saved_steps(folder):
            return read_recipe_file(f"{folder}/config.yaml")
    return None
