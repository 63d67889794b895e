"""Writes the README.md of an export: what the model is, where it came from, how to load it."""

from typing import Any

import yaml

from gmlp_scale.models import ModelConfig

_LOADING = {
    "masked_language_model": (
        "fill-mask",
        'fill = pipeline("fill-mask", model="FOLDER", trust_remote_code=True)\nfill("Paris is the <mask> of France.")',
    ),
    "sequence_classification": (
        "text-classification",
        'classify = pipeline("text-classification", model="FOLDER", trust_remote_code=True)\n'
        'classify({"text": "A first sentence.", "text_pair": "A second one, if the task has pairs."})',
    ),
    "question_answering": (
        "question-answering",
        'answer = pipeline("question-answering", model="FOLDER", trust_remote_code=True)\n'
        'answer(question="Who wrote it?", context="It was written by her.")',
    ),
}


def model_card(
    model: ModelConfig, num_parameters: int, head: str, row_length: int | None, details: dict[str, Any]
) -> str:
    """The card in Markdown. Each section of `details` is shown unchanged, under a heading of its own."""
    task, loading = _LOADING[head]
    n = row_length or model.sequence_length
    longest = model.sequence_length if model.masks_padding else n
    length = f"At most {longest} tokens a row; longer ones raise a ValueError. Rows in training had {n}."
    if model.masks_padding:
        padding = "No position attends to padding, so a row has the same logits in any batch."
    else:
        padding = (
            f"The model masks no padding: it pads every row to {n} tokens itself, as in training, so a row has the "
            f"same logits in any batch. The cost: a short row takes the time and memory of {n} tokens. Loading with "
            "`row_length=...` sets another length, which gives other logits."
        )
    return f"""---
library_name: transformers
pipeline_tag: {task}
tags: [gmlp_scale, {model.kind}]
---
# {model.display_name}, {model.num_blocks} blocks of width {model.d_model}, {num_parameters:,} parameters

{_provenance(details)}An encoder of "Pay Attention to MLPs" (https://arxiv.org/abs/2105.08050), or one that it compares
with, trained by gmlp_scale.

```python
from transformers import pipeline

{loading}
```

`AutoTokenizer`, `AutoModel`, `AutoModelForMaskedLM`, `AutoModelForSequenceClassification` and
`AutoModelForQuestionAnswering` load the folder as well, with `trust_remote_code=True`. That code, the `.py` files here,
needs torch and transformers and nothing else.

- {length}
- {padding}
- The names of special tokens in a text, such as `<mask>`, are read as those tokens, unless the tokenizer is called with
  `split_special_tokens=True`. All other text has the ids of `tokenizer.model`, a SentencePiece model without
  normalisation and with byte fallback: nothing of a text is lost.
- `gmlp_scale.trained.read_export` reads the folder; finetuning with gmlp_scale starts from it.

{_sections(details)}"""


def _provenance(details: dict[str, Any]) -> str:
    if "step" not in details:
        return ""
    heldout = details.get("heldout")
    if heldout is None:
        return f"Pretrained for {details['step']:,} steps; its held-out perplexity was not measured.\n\n"
    return (
        f"Pretrained for {details['step']:,} steps; held-out perplexity {heldout['perplexity']:.3f} "
        f"(measured at step {heldout['step']:,}; comparable within one tokenizer only).\n\n"
    )


def _sections(details: dict[str, Any]) -> str:
    blocks = (
        f"## {name}\n\n```yaml\n{yaml.safe_dump({name: content}, sort_keys=False)}```\n"
        for name, content in details.items()
    )
    return "\n".join(blocks)
