"""The `data` section of a pretraining recipe, the manifests of its sources, and what checkpoints keep of both."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Tag, model_validator

from gmlp_scale.data.batch import PAD_ID, num_masked_positions
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.mixture import SourceConfig, changing_steps, with_names
from gmlp_scale.data.shards import Manifest
from gmlp_scale.fields import Count, CountFrom0, FreeOnResume, OfOneMachine
from gmlp_scale.piecewise import Piecewise, number_or_pieces
from gmlp_scale.storage.files import Place, is_url

_CACHE_MAX_BYTES = 500_000_000_000
_OF_ALL = ("tokenizer_sha256", "sequence_length", "vocab_size", "packing")
"""Facts that all sources of a mixture share."""


def _is_fraction(value: Any) -> bool:
    """A text may be a fraction too: YAML reads 15e-2 as a text."""
    try:
        return isinstance(value, float | str) and 0 < float(value) < 1
    except ValueError:
        return False


class DataConfig(BaseModel, frozen=True, extra="forbid"):
    shards: FreeOnResume[
        Annotated[
            Annotated[Place[str], Tag("folder")] | Annotated[tuple[SourceConfig, ...], Tag("list")],
            Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "folder"),
        ]
    ]
    """Folder that data_prep/tokenize_corpus.py wrote: a path or a URL that fsspec opens. Or a mixture: a list of
    {shards, weight}, of which each may have a name, from_step and until_step."""
    cache_dir: OfOneMachine[Place[str | None]] = None
    """Local folder that shards are copied to when they are first read; a URL needs one. With room for all shards a node
    fetches each once, else most of them in every epoch."""
    cache_max_bytes: OfOneMachine[Count] = _CACHE_MAX_BYTES
    """Beyond this the copies that were used longest ago are removed, a tenth of it at once; one limit for all ranks of
    a node. [bytes]"""
    packing: Literal["packed", "document"] = "packed"
    """How documents were put into rows; the shards must have been written so. document: rows of one each, with padding
    behind it, which a model reads like text unless it has masks_padding."""
    masked_fraction: Annotated[
        float | tuple[tuple[int, float], ...], number_or_pieces(_is_fraction, "a number between 0 and 1")
    ] = 0.15
    """How much of each row is masked (BERT's 15 %, as in the paper). Or a list of [from_step, fraction], as for
    train.global_batch_size; every evaluation masks the last fraction. [fraction]"""
    shuffle_group_bytes: Count = 200_000_000
    """Rows are shuffled within groups of shards of about this size. A rank keeps about two groups of each source in
    memory. [bytes]"""
    prefetch_steps: FreeOnResume[Count] = 64
    """How many steps' batches are made ahead; they take 10 bytes of host memory per token. [steps]"""
    on_corrupt_shard: FreeOnResume[Literal["error", "skip"]] = "error"
    """A shard whose checksum does not hold: end the run, or go on without its rows."""
    max_corrupt_shards: FreeOnResume[CountFrom0] = 0
    """How many distinct corrupt shards a run may skip. [shards]"""

    @property
    def is_mixture(self) -> bool:
        return not isinstance(self.shards, str)

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The folders of shards that the rows come from, each with its name."""
        return with_names(self.shards if self.is_mixture else (SourceConfig(shards=self.shards, weight=1),))

    @property
    def masked_fractions(self) -> Piecewise:
        """How much of the rows of each step is masked."""
        return Piecewise(self.masked_fraction)

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer, which is the same for all sources."""
        return f"{self.sources[0].shards}/tokenizer"

    @property
    def padded(self) -> bool:
        """Whether a model may mask <pad>. Packed rows have nearly none: a task fills all its rows but the last."""
        return self.packing == "document"

    @model_validator(mode="after")
    def _settings_take_effect(self):
        if (self.on_corrupt_shard == "skip") != (self.max_corrupt_shards > 0):
            raise ValueError(
                f"on_corrupt_shard={self.on_corrupt_shard} with max_corrupt_shards={self.max_corrupt_shards}: "
                "skip needs max_corrupt_shards of at least 1, error needs 0"
            )
        if self.cache_dir and is_url(self.cache_dir):
            raise ValueError(f"cache_dir={self.cache_dir}: needed is a folder of this machine, not a URL")
        if self.cache_dir is None and self.cache_max_bytes != _CACHE_MAX_BYTES:
            raise ValueError(
                f"cache_max_bytes={self.cache_max_bytes} without a cache_dir has nothing to limit: set cache_dir, or "
                f"leave cache_max_bytes at {_CACHE_MAX_BYTES}"
            )
        return self


def load_manifests(config: DataConfig, sequence_length: int, vocab_size: int) -> list[Manifest]:
    """The manifest of each source. Raises ShardError if one does not fit the recipe or the others, or our models."""
    manifests = [Manifest.load(source.shards) for source in config.sources]
    check_manifests(manifests, config, sequence_length, vocab_size)
    check_masks(manifests, config)
    if config.padded and (found := manifests[0].special.pad) != PAD_ID:
        raise ShardError(
            f"the shards at {config.sources[0].shards} are padded with id {found}, the models take id {PAD_ID} for "
            "padding: write shards with --packing packed"
        )
    return manifests


def check_masks(manifests: Sequence[Manifest], config: DataConfig) -> None:
    """Raises ShardError if the vocabulary has no mask token."""
    if manifests[0].special.mask is None:
        raise ShardError(
            f"the vocabulary of the shards at {config.sources[0].shards} has no mask token, so nothing can be masked: "
            "train a causal model on RowLoader's rows without masks, or write the shards with a tokenizer that has one"
        )


def check_manifests(manifests: Sequence[Manifest], config: DataConfig, sequence_length: int, vocab_size: int) -> None:
    """Raises ShardError if the manifest of a source does not fit the recipe or the others."""
    for source, manifest in zip(config.sources, manifests, strict=True):
        _check_fit(source.shards, manifest, config, sequence_length, vocab_size)
        if (manifest.tokenizer_sha256, manifest.special) != (manifests[0].tokenizer_sha256, manifests[0].special):
            raise ShardError(
                f"the shards at {source.shards} were written with another tokenizer than those at "
                f"{config.sources[0].shards}: write all sources of a mixture with one, and with one end token"
            )


def _check_fit(folder: str, manifest: Manifest, config: DataConfig, sequence_length: int, vocab_size: int) -> None:
    """Raises ShardError, which names everything in which the shards and the recipe disagree."""
    compared = [
        ("model.sequence_length", sequence_length, manifest.sequence_length),
        ("model.vocab_size", vocab_size, manifest.vocab_size),
        ("data.packing", config.packing, manifest.packing),
    ]
    mistakes = [f"{field} is {wanted}, the shards have {found}" for field, wanted, found in compared if wanted != found]
    for fraction in config.masked_fractions.values:
        if num_masked_positions(sequence_length, fraction) < 1:
            mistakes.append(f"data.masked_fraction={fraction} masks none of {sequence_length} positions")
    if not manifest.splits.train:
        mistakes.append("the shards have no training rows")
    if mistakes:
        raise ShardError(
            f"the shards at {folder} do not fit the recipe: {'; '.join(mistakes)}. "
            "Change the recipe, or write other shards with data_prep/tokenize_corpus.py"
        )


def fingerprint(config: DataConfig, manifests: Sequence[Manifest], num_heldout_rows: int) -> dict[str, Any]:
    """Facts of a run's data, JSON-able. Those of a mixture also have each source by its name."""
    of_all = {name: getattr(manifests[0], name) for name in _OF_ALL}
    of_all |= {"train_rows": sum(manifest.num_rows("train") for manifest in manifests)}
    of_all |= {"heldout_rows": num_heldout_rows}
    if not config.is_mixture:
        return {"manifest_sha256": manifests[0].sha256, **of_all}
    sources = {
        source.name: {"manifest_sha256": manifest.sha256, "train_rows": manifest.num_rows("train"), **_share_of(source)}
        for source, manifest in zip(config.sources, manifests, strict=True)
    }
    return of_all | {"sources": sources}


def _share_of(source: SourceConfig) -> dict[str, Any]:
    return source.model_dump(include={"weight", "from_step", "until_step"})


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
    return {alone.name: facts | _share_of(alone)}


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
