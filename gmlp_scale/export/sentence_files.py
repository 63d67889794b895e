"""The files by which sentence-transformers loads an export: the encoder, then the mean over a text's tokens.

They have the form of versions before 5.4, which later ones read too. Without them the library would choose the same
modules, by its own defaults.
"""

import json
from pathlib import Path

_POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write_sentence_files(folder: Path, d_model: int, max_length: int) -> None:
    """Writes modules.json and each module's config; longer texts than `max_length` [tokens] are cut."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    content_of = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": d_model,
            **{f"pooling_mode_{pooling}": pooling == "mean_tokens" for pooling in _POOLINGS},
            "include_prompt": True,
        },
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    (folder / "1_Pooling").mkdir()
    for name, content in content_of.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
