"""Checks that a run which goes on from a checkpoint is still the run that wrote it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from torch import nn

from gmlp_scale.checkpoint.format import Checkpoint
from gmlp_scale.data.data_config import changes_of_earlier_rows, comparable
from gmlp_scale.fields import Mark, flatten, is_one_of, marked_fields
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, Recipe, RunConfig

log = logging.getLogger(__name__)


def check_continues(
    config: Recipe, fingerprint: dict[str, Any], checkpoint: Checkpoint, model: nn.Module, *, is_branch: bool = False
) -> None:
    """Raises ConfigError with the differences that make this another run than the one that wrote the checkpoint.

    Args:
        fingerprint: of the run's data.
        model: the run's, which may be on the meta device.
        is_branch: this is a new run that goes on from there, so the fields marked FreeInBranch may differ too.
    """
    now = {"config": config.to_json(), "data": fingerprint}
    place = config.branch_from if is_branch else str(checkpoint.path)
    before = {**checkpoint.details, "config": _with_defaults(checkpoint.details["config"], config)}
    continued = Continued(config, place, before, now, checkpoint.step, is_branch, checkpoint.misfit(model))
    for rule in RULES:
        rule(continued)
    for field in config.train.allow_changed_on_resume:
        log.warning("%s may differ from the checkpoint's (train.allow_changed_on_resume)", field)


@dataclass(frozen=True)
class Continued:
    """A run and the checkpoint that it goes on from."""

    config: Recipe
    place: str
    """What messages name: the checkpoint's folder or, for a branch, RUN@STEP."""
    before: dict[str, Any]
    """The checkpoint's details, with the defaults of fields that are newer than it."""
    now: dict[str, Any]
    """`config` and `data`, as this run's checkpoints will have them."""
    step: int
    is_branch: bool
    misfit: str
    """What Checkpoint.misfit says of the run's model. No setting can allow other parameters."""

    def refuse(self, differences: list[str], needed: str) -> None:
        """Raises ConfigError if there are differences."""
        if differences:
            raise ConfigError(f"{self.place} belongs to another run", differences, needed)

    @property
    def may_take_weights(self) -> str:
        """How a new run can begin with the old run's weights, for the end of a message. Only runs of text can."""
        is_text = isinstance(self.config, RunConfig)
        return "; init_from takes the weights alone, also to another length or vocabulary" if is_text else ""


def changed_fields(stored: dict[str, Any], config: Recipe, *also_free: str) -> list[str]:
    """One line for each field in which a finished run's resolved config, `stored`, is not `config`'s.

    Whatever train.allow_changed_on_resume says: a finished run does not go on. `also_free`: fields that may differ.
    """
    free = (*marked_fields(Mark.FREE_ON_RESUME, type(config)), *also_free)
    return check_unchanged(_with_defaults(stored, config), config.to_json(), free)


def check_unchanged(before: Mapping, now: Mapping, free: tuple[str, ...] = ()) -> list[str]:
    """One line for each field that differs between a checkpoint and a run.

    Args:
        before, now: the resolved configs of both, or the fingerprints of their data.
        free: fields that may differ. A section stands for all of its fields.
    """
    old, new = dict(flatten(before)), dict(flatten(now))
    return [
        f"{field}: the checkpoint was trained with {old.get(field)!r}; the run says {new.get(field)!r}"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field) and not is_one_of(field, free)
    ]


def _with_defaults(stored: dict[str, Any], config: Recipe) -> dict[str, Any]:
    """A checkpoint's resolved config with the defaults of fields that are newer than it, and with `config`'s engine."""
    try:
        return type(config).model_validate(stored | {"engine": config.engine}).to_json()
    except ValidationError:  # it has fields that are gone, so it differs from the run's in any case
        return stored


def _same_optimizer(run: Continued) -> None:
    """No setting can allow another optimizer: a checkpoint has the states of the one that wrote it."""
    now, found = (of["config"]["optimizer"].get("kind", "adamw") for of in (run.now, run.before))
    if now != found:
        needed = f"give optimizer.kind={found}, or another name=... for a new run{run.may_take_weights}"
        line = f"optimizer.kind: found {now}, but {run.place} has the states of {found}"
        raise ConfigError(run.config.name, [line], needed)


def _same_start(run: Continued) -> None:
    """A branch has its trunk's weights. So its init_from can only repeat how the trunk began."""
    now, found = (of["config"].get("init_from") for of in (run.now, run.before))
    if run.is_branch and now not in (None, found):
        line = f"init_from: found {now}, but the run goes on with the weights of branch_from={run.place}"
        raise ConfigError(run.config.name, [line], f"give init_from={found or 'null'}, or no branch_from")


def _same_budget(run: Continued) -> None:
    """Once the decay has begun, no setting can allow another budget, length or decay: they decided where it begins.

    A branch has a decay of its own.
    """
    decided = run.before.get("time_budget", {}).get("decided")
    if run.is_branch or not decided:
        return
    old, new = dict(flatten(run.before["config"])), dict(flatten(run.now["config"]))
    differences = [
        f"{field}: found {new[field]}, but with {old[field]} the decay began after step {decided['at_step']}"
        for field in ("train.time_budget_seconds", "train.num_steps", "optimizer.decay_steps")
        if new[field] != old[field]
    ]
    run.refuse(differences, f"give the old values, or branch_from=RUN@{decided['at_step']} with another name and decay")


def _same_fields_and_data(run: Continued) -> None:
    allowed = tuple(run.config.train.allow_changed_on_resume)
    free = marked_fields(Mark.FREE_ON_RESUME, type(run.config))
    free += marked_fields(Mark.FREE_IN_BRANCH, type(run.config)) if run.is_branch else ()
    if run.now["config"]["data"].get("packing") == "document":  # packed rows hold no padding, so its mask is free there
        free = tuple(name for name in free if name != "model.masks_padding")
    changed = check_unchanged(run.before["config"], run.now["config"], free + (() if run.misfit else allowed))
    differences = [*changed, *_data_changes(run, "data.shards" in allowed), *([run.misfit] if run.misfit else [])]
    can_be_allowed = [line.partition(":")[0] for line in changed]
    if any(line.startswith("data sources.") for line in differences):
        can_be_allowed.append("data.shards")
    needed = "give the run another name=..., or the old values and data"
    if run.misfit:
        needed += f". Other parameters cannot be allowed{run.may_take_weights}"
    elif can_be_allowed:
        fields = ", ".join((*allowed, *can_be_allowed))
        needed += f"; or, to go on with the new values, 'train.allow_changed_on_resume=[{fields}]'"
    run.refuse(differences, needed)


def _data_changes(run: Continued, may_change: bool) -> Iterator[str]:
    """A line for each change of the data. Where data.shards may change, sources may join or leave from the step on."""
    old, new = run.before["data"], run.now["data"]
    is_text = isinstance(run.config, RunConfig) and (may_change or "sources" in old or "sources" in new)
    if is_text:
        old, new = comparable(run.before), comparable(run.now)
    yield from (f"data {line}" for line in check_unchanged(old, new, ("sources",) if may_change else ()))
    if is_text and may_change:
        yield from changes_of_earlier_rows(run.before, run.now, run.step)


def _same_rows_before(run: Continued) -> None:
    """The step alone says which rows were seen. So the batches before it must stay as they were."""
    if not isinstance(run.config, PretrainingRecipe):
        return
    old, new = Piecewise(run.before["config"]["train"]["global_batch_size"]), run.config.train.batch_sizes
    starts = [start for start in (*old.starts, *new.starts) if start < run.step]
    if any(new.at(start) != old.at(start) for start in starts):
        pieces = [[start, rows] for start, rows in zip(old.starts, old.values, strict=True) if start < run.step]
        line = f"train.global_batch_size: other batches before step {run.step} than the checkpoint's"
        pieces.append([run.step, new.last])
        needed = f"keep these and change the batch from step {run.step} on: train.global_batch_size='{pieces}'"
        raise ConfigError(run.config.name, [line], needed)


RULES: tuple[Callable[[Continued], None], ...] = (
    _same_optimizer,
    _same_start,
    _same_budget,
    _same_fields_and_data,
    _same_rows_before,
)
"""Each raises ConfigError if the run breaks it."""
