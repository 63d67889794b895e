"""The README.md of an export, the model card: what the model is, how to load it, its data, training and scores.

Its text stands in card.md. The metadata before the text follow https://huggingface.co/docs/hub/model-cards.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ValidationError

from gmlp_scale.checkpoint.trained import Head, TrainedModel, recipe_in
from gmlp_scale.models import ModelConfig
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.time_budget import num_steps_of

_USAGE: dict[Head, tuple[str, str]] = {
    "masked_language_model": ("fill-mask", '"Paris is the <mask> of France."'),
    "sequence_classification": (
        "text-classification",
        '{"text": "A first sentence.", "text_pair": "A second one, if the task has pairs."}',
    ),
    "token_classification": ("token-classification", '"Ada was born in London.", aggregation_strategy="first"'),
    "question_answering": ("question-answering", 'question="Who wrote it?", context="It was written by her."'),
}
"""For each head: the pipeline, and what the example gives it."""
_METRICS = {
    "perplexity": "perplexity",
    "accuracy": "accuracy",
    "exact_match": "exact_match",
    "exact": "exact",
    "f1": "f1",
    "matthews": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
}
"""The figures in model-index, and what the Hub's `evaluate` calls them. The sections show the others too."""


@dataclass(frozen=True)
class Publication:
    """What no file of a run says and the card should. None and () are shown as unknown."""

    license: str | None = None
    """The Hub's name of a license, such as apache-2.0."""
    languages: tuple[str, ...] = ()
    """Of the training text, as ISO 639 codes."""
    dataset: str | None = None
    """The training text: its name on the Hub, such as allenai/c4."""
    repository: str | None = None
    """OWNER/NAME on the Hub; None for a folder that stays local."""
    revision: str | None = None
    """The branch of the repository."""


class _Data(BaseModel):
    """What the card shows of a fingerprint of shards."""

    train_rows: int
    heldout_rows: int
    sequence_length: int
    packing: str
    vocab_size: int
    tokenizer_sha256: str
    manifest_sha256: str = ""
    sources: dict[str, dict[str, Any]] = {}


def model_card(trained: TrainedModel, publication: Publication) -> str:
    """The card in Markdown. Its last section shows the model's `details` unchanged."""
    model, details = trained.config, trained.details
    recipe, finetuned, heldout = recipe_in(details), details.get("finetuned"), _heldout(details)
    if finetuned:
        figures = {f"{part} {name}": value for part, of in finetuned["scores"].items() for name, value in of.items()}
    else:
        figures = {name: heldout[name] for name in ("loss", "perplexity", "accuracy")} if recipe and heldout else {}
    task, example = _USAGE[trained.head]
    return render(
        "card.md",
        metadata=_metadata(model, task, details, publication),
        model=model,
        num_parameters=trained.num_parameters,
        details=details,
        publication=publication,
        task=task,
        example=example,
        row_length=trained.row_length or model.sequence_length,
        data=_data(details),
        shards_name=partial(_shards_name, details),
        training=_training(recipe, details) if recipe else {},
        precision=recipe and recipe.train.precision,
        finetuned=finetuned,
        heldout=heldout,
        scores={name: f"{value:.4f}" for name, value in figures.items()},
        settings=yaml.safe_dump(details, sort_keys=False),
    )


def render(template: str, *, package: str = "gmlp_scale.export", **values: Any) -> str:
    """A Markdown file of the package with the values in it."""
    environment = Environment(
        loader=PackageLoader(package, "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def _metadata(model: ModelConfig, task: str, details: dict[str, Any], publication: Publication) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    if heldout := _heldout(details):
        data_name, measured = publication.dataset or _shards_name(details), {"heldout": heldout}
        facts = {"dataset_args": {"num_rows": heldout["num_rows"]}}
    else:
        finetuned = details.get("finetuned", {"task": None, "scores": {}})
        data_name, measured, facts = finetuned["task"], finetuned["scores"], {}
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data_name,
            dataset_name=data_name,
            dataset_split=part,
            metric_type=metric,
            metric_value=figures[name],
            **facts,
        )
        for part, figures in measured.items()
        for name, metric in _METRICS.items()
        if math.isfinite(figures.get(name, math.nan))
    ]
    card = ModelCardData(
        license=publication.license or "unknown",
        language=list(publication.languages) or None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["gmlp_scale", model.kind],
        datasets=[publication.dataset] if publication.dataset else None,
        model_name=(publication.repository or model.display_name) if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _training(recipe: RunConfig, details: dict[str, Any]) -> dict[str, Any]:
    """The main settings, those of every step and of the whole run so far."""
    train, step = recipe.train, details["step"]
    settings = recipe.optimizer.model_dump(exclude_none=True, exclude={"kind"})
    starts = {"began with the weights of": recipe.init_from, "branched off": recipe.branch_from}
    return {
        "recipe": recipe.name,
        **{name: place for name, place in starts.items() if place},
        "steps": f"{step:,} of {num_steps_of(_of_pretraining(details), train.num_steps):,}",
        "rows per step": f"{train.batch_sizes.shown()}, of {recipe.model.sequence_length} tokens",
        "tokens read": f"{recipe.tokens_per_step.before(step):,}",
        "masked positions": recipe.data.masked_fractions.shown("{:.0%}".format),
        "training FLOPs": f"{recipe.flops_per_step().before(step):.3g}",
        "precision": train.precision,
        "optimizer": recipe.optimizer.kind,
        **{name.replace("_", " "): value for name, value in settings.items()},
        "engine": recipe.engine.kind,
        "seed": recipe.seed,
    }


def _heldout(details: dict[str, Any]) -> dict[str, Any] | None:
    """The held-out evaluation of these very weights; None if there was none after their step."""
    heldout = details.get("heldout")
    return heldout if heldout and heldout["step"] == details["step"] else None


def _data(details: dict[str, Any]) -> _Data | None:
    """None for an export whose details, which anyone may write, have no recipe or no such data."""
    of_pretraining = _of_pretraining(details)
    try:
        return _Data.model_validate(of_pretraining.get("data")) if recipe_in(of_pretraining) else None
    except ValidationError:
        return None


def _shards_name(details: dict[str, Any]) -> str:
    shards = _of_pretraining(details)["config"]["data"]["shards"]
    if isinstance(shards, str):
        return shards
    return ", ".join(f"{source['shards']} (weight {source['weight']:g})" for source in shards)


def _of_pretraining(details: dict[str, Any]) -> dict[str, Any]:
    return details.get("pretrained") or details
