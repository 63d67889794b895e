"""The facts of a run's data that its checkpoints keep, and which of them a resumed run has changed."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from gmlp_scale.data.mixture import SourceConfig, changing_steps, with_names
from gmlp_scale.data.source import Source

_OF_ALL = ("tokenizer_sha256", "sequence_length", "vocab_size", "packing")
"""Facts that all sources of a mixture share."""


def fingerprint(sources: Sequence[Source], num_heldout_rows: int, is_mixture: bool) -> dict[str, Any]:
    """The facts, JSON-able. Those of a mixture also have each source by its name, with its weight and steps."""
    manifest = sources[0].manifest
    facts = {name: getattr(manifest, name) for name in _OF_ALL}
    facts |= {"train_rows": sum(source.num_rows for source in sources), "heldout_rows": num_heldout_rows}
    if not is_mixture:
        return {"manifest_sha256": manifest.sha256, **facts}
    return facts | {
        "sources": {
            source.config.name: {
                "manifest_sha256": source.manifest.sha256,
                "train_rows": source.num_rows,
                **source.config.model_dump(include={"weight", "from_step", "until_step"}),
            }
            for source in sources
        }
    }


def comparable(details: dict[str, Any]) -> dict[str, Any]:
    """The facts in a checkpoint's details, or a run's, with a line for each source; a single source is one of weight 1.

    details: the `config` and the fingerprint, as `data`.
    """
    lines = {}
    for place, (name, facts) in enumerate(_sources(details).items()):
        until = "the end" if facts["until_step"] is None else f"step {facts['until_step']}"
        lines[name] = (
            f"weight {facts['weight']:.15g} from step {facts['from_step']} to {until}, place {place} of the list, "
            f"{facts['train_rows']:,} rows, manifest {facts['manifest_sha256'][:12]}"
        )
    return {name: details["data"][name] for name in _OF_ALL} | {"sources": lines}


def changes_of_earlier_rows(before: dict[str, Any], now: dict[str, Any], step: int) -> Iterable[str]:
    """A line if the sources of `now` would have given other rows than those of `before` to a step below `step`."""
    old, new = _sources(before), _sources(now)
    for earlier in changing_steps(map(_config, [*old.values(), *new.values()])):
        shares = _shares(old, earlier), _shares(new, earlier)
        if earlier < step and shares[0].keys() != shares[1].keys():
            found, wanted = ("; ".join(sources.values()) for sources in reversed(shares))
            yield (
                f"data.shards: gives step {earlier} {found}; needed: {wanted}, as before the checkpoint. A source "
                f"keeps its place in the list and its weight; a new one comes last, with from_step of at least {step}, "
                f"and one that ends gets an until_step of at least {step}"
            )
            return


def _sources(details: dict[str, Any]) -> dict[str, dict[str, Any]]:
    data = details["data"]
    if "sources" in data:
        return data["sources"]
    (alone,) = with_names([SourceConfig(shards=details["config"]["data"]["shards"], weight=1)])
    facts = {name: data[name] for name in ("manifest_sha256", "train_rows")}
    return {alone.name: facts | alone.model_dump(include={"weight", "from_step", "until_step"})}


def _config(facts: dict[str, Any]) -> SourceConfig:
    return SourceConfig(shards="", **{name: facts[name] for name in ("weight", "from_step", "until_step")})


def _shares(sources: dict[str, dict[str, Any]], step: int) -> dict[tuple[int, str, Fraction], str]:
    """What decides the rows of a step: the place, manifest and share of each active source, and a text that says so."""
    places = enumerate(sources.items())
    active = [(place, name, facts) for place, (name, facts) in places if _config(facts).is_active(step)]
    total = sum(Fraction(str(facts["weight"])) for _, _, facts in active)
    shares = {}
    for place, name, facts in active:
        share, manifest = Fraction(str(facts["weight"])) / total, facts["manifest_sha256"]
        shares[place, manifest, share] = f"{float(share):.4g} of {name} (place {place}, manifest {manifest[:12]})"
    return shares
