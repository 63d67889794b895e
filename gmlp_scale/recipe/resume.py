"""Checks that a run which goes on from a checkpoint is still the run that wrote it."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gmlp_scale.data.fingerprint import changes_of_earlier_rows, comparable
from gmlp_scale.piecewise import Piecewise
from gmlp_scale.recipe.config import ConfigError, PretrainingRecipe, Recipe, RunConfig, flatten

log = logging.getLogger(__name__)

FREE_IN_BRANCH = ("optimizer.", "train.num_steps", "train.time_budget_seconds", "init_from", "branch_from")
"""Fields that a branch may change beside those of `free_on_resume`."""


def check_continues(
    config: Recipe, place: str, before: dict, now: dict, *, step: int, is_branch: bool = False, misfit: str = ""
) -> None:
    """Raises ConfigError with every difference that makes this another run than the one at `place`.

    Args:
        place: what messages name: the checkpoint's folder or, for a branch, RUN@STEP.
        before, now: the details of the checkpoint, and the details that this run's checkpoints will have.
        step: the finished steps of the run at `place`.
        is_branch: this is a new run that goes on from there, so the fields of FREE_IN_BRANCH may differ too.
        misfit: what Checkpoint.misfit says of the run's model. No setting can allow other parameters.
    """
    allowed = tuple(config.train.allow_changed_on_resume)
    config_before = _with_defaults(before["config"], config)
    _check_same_optimizer(config, place, config_before)
    if is_branch:
        _check_same_start(config, place, config_before)
    else:  # a branch has a decay of its own
        _check_same_budget(config, place, before)
    free = config.free_on_resume + (FREE_IN_BRANCH if is_branch else ()) + (() if misfit else allowed)
    changed = check_unchanged(config_before, now["config"], free)
    differences = [*changed, *_data_changes(config, before, now, step), *([misfit] if misfit else [])]
    if differences:
        needed = "give the run another name=..., or the old values and data"
        can_be_allowed = [line.partition(":")[0] for line in changed]
        if any(line.startswith("data sources.") for line in differences):
            can_be_allowed.append("data.shards")
        if misfit:
            needed += f". Other parameters cannot be allowed{_taking_weights(config)}"
        elif can_be_allowed:
            fields = ", ".join((*allowed, *can_be_allowed))
            needed += f"; or, to go on with the new values, 'train.allow_changed_on_resume=[{fields}]'"
        raise ConfigError(f"{place} belongs to another run", differences, needed)
    _check_same_rows_before(config, config_before, step)
    for field in allowed:
        log.warning("%s may differ from the checkpoint's (train.allow_changed_on_resume)", field)


def changed_fields(stored: dict[str, Any], config: Recipe, *also_free: str) -> list[str]:
    """One line for each field in which a finished run's resolved config, `stored`, is not `config`'s.

    Whatever train.allow_changed_on_resume says: a finished run does not go on. `also_free`: fields that may differ.
    """
    return check_unchanged(_with_defaults(stored, config), config.to_json(), (*config.free_on_resume, *also_free))


def _with_defaults(stored: dict[str, Any], config: Recipe) -> dict[str, Any]:
    """A checkpoint's resolved config with the defaults of fields that are newer than it, and with `config`'s engine."""
    try:
        return type(config).model_validate(stored | {"engine": config.engine}).to_json()
    except ValidationError:  # it has fields that are gone, so it differs from the run's in any case
        return stored


def check_unchanged(before: Mapping, now: Mapping, free: tuple[str, ...] = ()) -> list[str]:
    """One line for each field that differs between a checkpoint and a run.

    Args:
        before, now: the resolved configs of both, or the fingerprints of their data.
        free: fields that may differ. "engine." stands for the whole section.
    """
    old, new = dict(flatten(before)), dict(flatten(now))
    return [
        f"{field}: the checkpoint was trained with {old.get(field)!r}; the run says {new.get(field)!r}"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field)
        and not any(field == f or (f.endswith(".") and field.startswith(f)) for f in free)
    ]


def _check_same_optimizer(config: Recipe, place: str, before: dict) -> None:
    """No setting can allow another optimizer: a checkpoint has the states of the one that wrote it."""
    now, found = (section.get("kind", "adamw") for section in (config.to_json()["optimizer"], before["optimizer"]))
    if now != found:
        needed = f"give optimizer.kind={found}, or another name=... for a new run{_taking_weights(config)}"
        line = f"optimizer.kind: found {now}, but {place} has the states of {found}"
        raise ConfigError(config.name, [line], needed)


def _check_same_start(config: Recipe, place: str, before: dict) -> None:
    """A branch has its trunk's weights. So its init_from can only repeat how the trunk began."""
    now, found = config.to_json().get("init_from"), before.get("init_from")
    if now not in (None, found):
        line = f"init_from: found {now}, but the run goes on with the weights of branch_from={place}"
        raise ConfigError(config.name, [line], f"give init_from={found or 'null'}, or no branch_from")


def _taking_weights(config: Recipe) -> str:
    """How a new run can begin with an old run's weights, for the end of a message. Only runs of text can."""
    is_text = isinstance(config, RunConfig)
    return "; init_from takes the weights alone, also to another length or vocabulary" if is_text else ""


def _check_same_budget(config: Recipe, place: str, before: dict) -> None:
    """Once the decay has begun, no setting can allow another budget, length or decay: they decided where it begins."""
    decided = before.get("time_budget", {}).get("decided")
    if not decided:
        return
    old, new = dict(flatten(before["config"])), config.fields()
    mistakes = [
        f"{field}: found {new[field]}, but with {old[field]} the decay began after step {decided['at_step']}"
        for field in ("train.time_budget_seconds", "train.num_steps", "optimizer.decay_steps")
        if new[field] != old[field]
    ]
    if mistakes:
        needed = f"give the old values, or branch_from=RUN@{decided['at_step']} with another name and decay"
        raise ConfigError(f"{place} belongs to another run", mistakes, needed)


def _check_same_rows_before(config: Recipe, before: dict, step: int) -> None:
    """The step alone says which rows were seen. So the batches before it must stay as they were."""
    if not isinstance(config, PretrainingRecipe):
        return
    old = Piecewise(before["train"]["global_batch_size"])
    new = config.train.batch_sizes
    starts = [start for start in (*old.starts, *new.starts) if start < step]
    if any(new.at(start) != old.at(start) for start in starts):
        pieces = [[start, rows] for start, rows in zip(old.starts, old.values, strict=True) if start < step]
        line = f"train.global_batch_size: other batches before step {step} than the checkpoint's"
        pieces.append([step, config.train.batch_sizes.last])
        needed = f"keep these and change the batch from step {step} on: train.global_batch_size='{pieces}'"
        raise ConfigError(config.name, [line], needed)


def _data_changes(config: Recipe, before: dict, now: dict, step: int) -> list[str]:
    """A line for each change of the data. Where data.shards may change, sources may join or leave from `step` on."""
    old, new, earlier = before["data"], now["data"], []
    may_change = "data.shards" in config.train.allow_changed_on_resume
    if isinstance(config, RunConfig) and (may_change or "sources" in old or "sources" in new):
        old, new = comparable(before), comparable(now)
        if may_change:
            earlier = list(changes_of_earlier_rows(before, now, step))
    lines = check_unchanged(old, new, ("sources.",) if may_change else ())
    return [*(f"data {line}" for line in lines), *earlier]
