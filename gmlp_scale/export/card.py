"""Writes the README.md of an export, the model card: what the model is, how to load it, its data, training and scores.

The metadata before the text follow https://huggingface.co/docs/hub/model-cards.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from gmlp_scale.checkpoint.trained import Head, recipe_in
from gmlp_scale.models import ModelConfig
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.train.schedule import num_steps_of

_USAGE: dict[Head, tuple[str, str]] = {
    "masked_language_model": ("fill-mask", '"Paris is the <mask> of France."'),
    "sequence_classification": (
        "text-classification",
        '{"text": "A first sentence.", "text_pair": "A second one, if the task has pairs."}',
    ),
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
"""The figures that model-index tells, and what the Hub's `evaluate` calls them. The sections show the others too."""


@dataclass(frozen=True)
class Publication:
    """What no file of a run says and the card should. None and () are told as unknown."""

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


def model_card(
    model: ModelConfig,
    num_parameters: int,
    head: Head,
    row_length: int | None,
    details: dict[str, Any],
    publication: Publication,
) -> str:
    """The card in Markdown. Its last section shows `details` unchanged."""
    recipe = recipe_in(details)
    settings = yaml.safe_dump(details, sort_keys=False)
    return f"""---
{_metadata(model, head, details, publication)}
---
# {model.display_name}, {model.num_blocks} blocks of width {model.d_model}, {num_parameters:,} parameters

{_provenance(details)}An encoder of "Pay Attention to MLPs" (https://arxiv.org/abs/2105.08050), or one that it compares
with, trained by gmlp_scale.

{_usage(head, publication)}

{_limits(model, row_length)}

## Data

{_data(details, publication)}

{_training(recipe, details)}{_evaluation(recipe, details)}## All settings

```yaml
{settings}```
"""


def _metadata(model: ModelConfig, head: Head, details: dict[str, Any], publication: Publication) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    task = _USAGE[head][0]
    if heldout := _heldout(details):
        data_name = publication.dataset or _shards_name(details)
        measured = {"heldout": heldout}
        facts = {"dataset_args": {"num_rows": heldout["num_rows"]}}
    else:
        finetuned = details.get("finetuned", {"task": None, "scores": {}})
        measured, data_name, facts = finetuned["scores"], finetuned["task"], {}
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data_name,
            dataset_name=data_name,
            dataset_split=part,
            metric_type=_METRICS[name],
            metric_value=figures[name],
            **facts,
        )
        for part, figures in measured.items()
        for name in _METRICS
        if name in figures
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


def _provenance(details: dict[str, Any]) -> str:
    if finetuned := details.get("finetuned"):
        return f"Finetuned on {finetuned['task']} for {finetuned['step']:,} steps.\n\n"
    if "step" not in details:
        return ""
    pretrained = f"Pretrained for {details['step']:,} steps; held-out perplexity"
    if heldout := _heldout(details):
        return f"{pretrained} {heldout['perplexity']:.3f} (comparable within one tokenizer only).\n\n"
    if earlier := details.get("heldout"):
        return (
            f"{pretrained} not measured at this step; {earlier['perplexity']:.3f} at step {earlier['step']:,} "
            "(comparable within one tokenizer only).\n\n"
        )
    return f"{pretrained} not measured.\n\n"


def _usage(head: Head, publication: Publication) -> str:
    pipeline, example = _USAGE[head]
    if publication.repository:
        where, place = "", f'"{publication.repository}", revision="{publication.revision}"'
    else:
        where, place = "In this folder:\n\n", '"."'
    return f"""{where}```python
from transformers import pipeline

model = pipeline("{pipeline}", model={place}, trust_remote_code=True)
print(model({example}))
```

`AutoTokenizer`, `AutoModel`, `AutoModelForMaskedLM`, `AutoModelForSequenceClassification` and
`AutoModelForQuestionAnswering` load it as well, with `trust_remote_code=True`. That code, the `.py` files here,
needs torch and transformers and nothing else."""


def _limits(model: ModelConfig, row_length: int | None) -> str:
    n = row_length or model.sequence_length
    longest = model.sequence_length if model.masks_padding else n
    if model.masks_padding:
        padding = "No position attends to padding, so a row has the same logits in any batch."
    else:
        padding = (
            f"The model masks no padding: it pads every row to {n} tokens itself, as in training, so a row has the "
            f"same logits in any batch. The cost: a short row takes the time and memory of {n} tokens. Loading with "
            "`row_length=...` sets another length, which gives other logits."
        )
    return f"""- At most {longest} tokens a row; longer ones raise a ValueError. Rows in training had {n}.
- {padding}
- The names of special tokens in a text, such as `<mask>`, are read as those tokens, unless the tokenizer is called with
  `split_special_tokens=True`. All other text has the ids of `tokenizer.model`, a SentencePiece model without
  normalisation and with byte fallback: nothing of a text is lost.
- `gmlp_scale.checkpoint.trained.read_export` reads the folder; finetuning with gmlp_scale starts from it."""


def _data(details: dict[str, Any], publication: Publication) -> str:
    unknown = "unknown: whoever exported the model did not say"
    rows = {
        "training text": publication.dataset or unknown,
        "language": ", ".join(publication.languages) or unknown,
        "license of the model": publication.license or unknown,
    }
    if data := _of_pretraining(details).get("data"):
        rows |= {
            "shards": _shards_name(details),
            "rows": f"{data['train_rows']:,} for training, {data['heldout_rows']:,} held out, "
            f"of {data['sequence_length']} tokens each ({data['packing']})",
            "tokenizer": f"SentencePiece, {data['vocab_size']:,} pieces, sha256 {data['tokenizer_sha256']}",
        }
        for name, source in data.get("sources", {"the shards": data}).items():
            rows[f"manifest of {name}"] = f"sha256 {source['manifest_sha256']}"
    return _table(rows)


def _training(recipe: RunConfig | None, details: dict[str, Any]) -> str:
    """The main settings, those of every step and of the whole run so far; nothing for a model without a recipe."""
    if recipe is None:
        return ""
    train, step = recipe.train, details["step"]
    settings = recipe.optimizer.model_dump(exclude_none=True, exclude={"kind"})
    starts = {"began with the weights of": recipe.init_from, "branched off": recipe.branch_from}
    rows = {
        "recipe": recipe.name,
        **{name: place for name, place in starts.items() if place},
        "steps": f"{step:,} of {_num_steps(recipe, details):,}",
        "rows per step": f"{train.batch_sizes.told()}, of {recipe.model.sequence_length} tokens",
        "tokens read": f"{recipe.tokens_per_step.before(step):,}",
        "masked positions": recipe.data.masked_fractions.told("{:.0%}".format),
        "training FLOPs": f"{recipe.flops_per_step().before(step):.3g}",
        "precision": train.precision,
        "optimizer": recipe.optimizer.kind,
        **{name.replace("_", " "): value for name, value in settings.items()},
        "engine": recipe.engine.kind,
        "seed": recipe.seed,
    }
    return f"## Training\n\n{_table(rows)}\n\n"


def _num_steps(recipe: RunConfig, details: dict[str, Any]) -> int:
    """The steps of the whole run, as its time budget has decided if it has one."""
    return num_steps_of(_of_pretraining(details), recipe.train.num_steps)


def _evaluation(recipe: RunConfig | None, details: dict[str, Any]) -> str:
    if finetuned := details.get("finetuned"):
        how = "The weights' scores, as the benchmark's own script computes them."
        figures = {f"{part} {name}": value for part, of in finetuned["scores"].items() for name, value in of.items()}
    elif recipe and (heldout := _heldout(details)):
        num_rows = f"{heldout['num_rows']:,}"
        how = (
            f"Masked-token prediction, measured by the training run after this step, in {recipe.train.precision}, on\n"
            f"the first {num_rows} held-out rows with fixed masks. `launch/evaluate.py --export` takes the same rows\n"
            "and masks, in float32."
        )
        figures = {name: heldout[name] for name in ("loss", "perplexity", "accuracy")}
    else:
        return ""
    rows = {name: f"{value:.4f}" for name, value in figures.items()}
    return f"## Evaluation\n\n{how}\n\n{_table(rows)}\n\n"


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])


def _heldout(details: dict[str, Any]) -> dict[str, Any] | None:
    """The held-out evaluation of these very weights; None if there was none after their step."""
    heldout = details.get("heldout")
    return heldout if heldout and heldout["step"] == details["step"] else None


def _shards_name(details: dict[str, Any]) -> str:
    shards = _of_pretraining(details)["config"]["data"]["shards"]
    if isinstance(shards, str):
        return shards
    return ", ".join(f"{source['shards']} (weight {source['weight']:g})" for source in shards)


def _of_pretraining(details: dict[str, Any]) -> dict[str, Any]:
    return details.get("pretrained") or details
