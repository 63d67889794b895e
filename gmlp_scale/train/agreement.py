"""Starts the ranks of a run, which must have one recipe, one data set and one version of the packages.

A stale file on a node is enough to break that. Such ranks would train together all the same, or wait without end.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from gmlp_scale import __version__
from gmlp_scale.distributed.logs import set_up_logging
from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.fields import Mark, is_one_of, marked_fields
from gmlp_scale.recipe.config import ConfigError, Recipe


def start_world_of(config: Recipe, *others: Recipe, **options: Any) -> World:
    """Joins the processes that the launcher started, as the recipe needs them, and sets up their logs.

    Args:
        others: recipes that the processes run later.
        options: of the command, where they decide what it does.

    Raises: as start_world; ConfigError if not all ranks were started with the same. Nothing before that depends on it.
    """
    engine = config.engine
    world = start_world(
        engine.timeout_seconds,
        config.train.device,
        init_group=engine.needs_process_group,
        run=config.run_folder,
        traces_in=config.run_dir.absolute(),
    )
    set_up_logging(world)
    try:
        with world.naming_lost_ranks():
            require_agreement(world, _what_ranks_share(config, *others) | options)
    except ConfigError:
        world.stop()
        raise
    return world


def _what_ranks_share(*recipes: Recipe) -> dict[str, Any]:
    """The values that are the same on every rank, by name: the recipes' fields, without those of one machine, and the
    versions."""
    shared = {"version of gmlp_scale": __version__, "version of torch": torch.__version__}
    for recipe in recipes:
        of_one_machine = marked_fields(Mark.OF_ONE_MACHINE, type(recipe))
        place = f"{recipe.name}: " if len(recipes) > 1 else ""
        fields = recipe.fields().items()
        shared |= {f"{place}{field}": value for field, value in fields if not is_one_of(field, of_one_machine)}
    return shared


def require_agreement(world: World, shared: Mapping[str, Any]) -> None:
    """Compares what each rank has, JSON-able values by name. One checksum of each is gathered, and the values only
    where the checksums differ.

    Raises:
        ConfigError: on every rank, with each value that differs and the ranks that have it.
    """
    if len(set(world.gather(hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()))) == 1:
        return
    of_ranks, differences = world.gather(shared), []
    for name in sorted({name for of_rank in of_ranks for name in of_rank}):
        having: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(of_ranks):
            having.setdefault(json.dumps(of_rank[name]) if name in of_rank else "nothing", []).append(rank)
        if len(having) > 1:
            found = "; ".join(f"{value} on {world.names_of(ranks)}" for value, ranks in having.items())
            differences.append(f"{name}: found {found}")
    needed = "give every rank the same recipe, options, data and packages"
    raise ConfigError("the ranks were not started alike", differences, needed)
