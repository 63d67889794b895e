"""What no section of a recipe can check alone. Each mistake reads `field: what was found; what is needed`."""

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gmlp_scale.engine import SHARDED_KINDS
from gmlp_scale.models import kinds_with
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.storage.files import is_url, open_filesystem

if TYPE_CHECKING:
    from gmlp_scale.recipe.config import PretrainingRecipe, Recipe

_STORES = ("s3", "s3a", "gs", "gcs", "memory")
"""Stores that let only one of several processes create a file, as the claim on a run folder needs."""


def recipe_mistakes(run: "Recipe") -> Iterable[str]:
    """What may be wrong with any recipe."""
    train = run.train
    yield from _place_mistakes(run.output_dir)
    batch, micro_batch = Piecewise(train.global_batch_size), train.micro_batch_size
    if micro_batch != "auto" and any(rows % micro_batch for rows in batch.values):
        needed = f"must divide train.global_batch_size = {batch.shown(str)}"
        yield f"train.micro_batch_size: found {micro_batch}; {needed}"
    if train.num_steps is not None:
        yield from stop_mistakes(train.stop_after_step, train.num_steps)
    first, last = train.profile_steps or (1, 1)
    if not first <= last <= (train.num_steps or last):
        needed = "[FIRST, LAST] in their order, at most train.num_steps"
        yield f"train.profile_steps: found {list(train.profile_steps)}; needed: {needed}"
    yield from run.engine.mistakes(train)
    yield from run.checkpoint.mistakes()


def rank_mistakes(run: "Recipe", world_size: int) -> Iterable[str]:
    """What may be wrong with any recipe on this number of ranks."""
    batch, micro_batch = Piecewise(run.train.global_batch_size), run.train.micro_batch_size
    if world_size > 1 and not run.engine.needs_process_group:
        needed = f"use {SHARDED_KINDS}, or start one process"
        yield f"engine.kind: found {run.engine.kind} with {world_size} ranks; {needed}"
    elif micro_batch == "auto" and any(rows % world_size for rows in batch.values):
        needed = f"must be a multiple of the number of ranks, {world_size}"
        yield f"train.global_batch_size: found {batch.shown(str)}; {needed}"
    elif micro_batch != "auto" and any(rows % (world_size * micro_batch) for rows in batch.values):
        needed = f"{world_size} ranks x micro_batch_size must divide train.global_batch_size = {batch.shown(str)}"
        most, is_rest = divmod(math.gcd(*batch.values), world_size)
        largest = f"no size fits {world_size} ranks" if is_rest else f"at most {most}"
        yield f"train.micro_batch_size: found {micro_batch}; {needed}: {largest}"


def pretraining_mistakes(run: "PretrainingRecipe") -> Iterable[str]:
    """What may be wrong with a recipe of pretraining, beside `recipe_mistakes`."""
    train = run.train
    if run.branch_from and (is_url(run.branch_from) or not re.fullmatch(r".+@\d+", run.branch_from)):
        yield f"branch_from: found {run.branch_from!r}; needed: RUN@STEP, a run folder that every host sees"
    yield from _schedule_mistakes(run)
    yield from _budget_mistakes(run)
    yield from change_mistakes("train.global_batch_size", train.batch_sizes, run.changes_end)
    if train.log_filters and not run.model.has_spatial_filters:
        needed = f"false, or a model with spatial filters: model.kind {kinds_with('has_spatial_filters')}"
        yield f"train.log_filters: found true with model.kind = {run.model.kind}; needed: {needed}"
    if train.compile == "reduce-overhead" and (train.device == "cpu" or train.precision != "bf16"):
        # No engine copies float32 gradients, so the next micro-batch's graphs would overwrite their memory.
        yield "train.compile: found reduce-overhead; needed: true or false, or a GPU with train.precision=bf16"


def change_mistakes(field: str, pieces: Piecewise, num_steps: float) -> Iterable[str]:
    if pieces.starts[-1] >= num_steps:
        found = f"found a change at step {pieces.starts[-1]}"
        yield f"{field}: {found}; needed: changes below train.num_steps = {num_steps}"


def stop_mistakes(stop_after_step: int | None, num_steps: int) -> Iterable[str]:
    if stop_after_step is not None and stop_after_step > num_steps:
        yield f"train.stop_after_step: found {stop_after_step}; must be at most train.num_steps = {num_steps}"


def _place_mistakes(output_dir: str) -> Iterable[str]:
    """The mistakes in an output_dir that is a URL. None repeats the URL, which may hold a password."""
    kind, _, rest = output_dir.partition("://")
    if not is_url(output_dir):
        return
    if kind not in _STORES or not rest.strip("/") or "?" in rest:
        found = f"found a URL that begins with {kind.partition(':')[0]}:"
        known = ", ".join(f"{store}://BUCKET/FOLDER" for store in _STORES)
        yield f"output_dir: {found}; needed: a path, or one of {known}, with the keys where that store's clients look"
        return
    try:
        open_filesystem(output_dir)
    except OSError as error:
        yield f"output_dir: {error}"


def _schedule_mistakes(run: "PretrainingRecipe") -> Iterable[str]:
    optimizer, num_steps = run.optimizer, run.train.num_steps
    if optimizer.warmup_steps >= num_steps:
        yield f"optimizer.warmup_steps: found {optimizer.warmup_steps}; must be below train.num_steps = {num_steps}"
    longest = max(0, num_steps - optimizer.warmup_steps) if optimizer.schedule == "stable" else 0
    if optimizer.decay_steps > longest:
        needed = f"at most {longest} with optimizer.schedule = {optimizer.schedule}"
        yield f"optimizer.decay_steps: found {optimizer.decay_steps}; needed: {needed}"


def _budget_mistakes(run: "PretrainingRecipe") -> Iterable[str]:
    if run.train.time_budget_seconds is None:
        return
    found = f"train.time_budget_seconds: found {run.train.time_budget_seconds:g}"
    if run.optimizer.schedule != "stable" or not run.optimizer.decay_steps:
        yield f"{found}; needed: null, or optimizer.schedule=stable with optimizer.decay_steps above 0"
    elif run.optimizer.decay_steps > run.train.num_steps - 2:
        needed = "optimizer.decay_steps of at most train.num_steps - 2, as the steps before the decay show the speed"
        yield f"{found} with optimizer.decay_steps = {run.optimizer.decay_steps}; needed: {needed}"
    if run.branch_from:
        yield f"{found} with branch_from; needed: null, as the other run's steps are not of this run's time"
