"""What every engine's collectives carry in a step, as a table."""

from benchmarks.comparison import markdown
from gmlp_scale.distributed.world import World
from gmlp_scale.engine import SHARDED_ENGINES, EngineConfig
from gmlp_scale.plan.describe import count_parameters
from gmlp_scale.plan.engine_bytes import COLLECTIVES, wire_bytes
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.trial.carried_bytes import count_step


def bytes_per_parameter(run: RunConfig, engine: EngineConfig, world: World, num_micro_batches: int) -> dict[str, float]:
    """What a step carries by each kind of collective and on the wire, and this rank's peak memory.

    All ranks call it together.
    """
    counts = count_step(run, engine, world, num_micro_batches)
    counted = {kind: counts.carried[kind] for kind in COLLECTIVES}
    counted |= {"wire": wire_bytes(counts.carried), "peak memory": counts.peak}
    num_parameters = count_parameters(run)
    return {name: num_bytes / num_parameters for name, num_bytes in counted.items()}


def table(run: RunConfig, world: World) -> str:
    """Every engine's bytes per parameter and step, with one and with four micro-batches, in Markdown."""
    figures = ["all-reduce", "reduce to owners", "gather", "all-to-all", "on the wire", "peak memory"]
    rows = []
    for name, engine in SHARDED_ENGINES.items():
        for num_micro_batches in (1, 4):
            counted = bytes_per_parameter(run, engine, world, num_micro_batches)
            rows.append([name, str(num_micro_batches), *(f"{value:.1f}" for value in counted.values())])
    return markdown(["engine", "micro-batches", *figures], rows)
