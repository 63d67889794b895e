"""ModernBERT's config.json and weights, as transformers has them, from those of our modern Transformer and back.

The trunks are the same, the heads are not. ModernBERT predicts a token with E norm(gelu(A x)) + b, we with E x. What is
written has no gelu, no b, and an A and a norm that cancel out, so it predicts as our model does. What is read leaves
the head out: a run that continues it first learns to predict with E alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, PAD_ID, SEP_ID, SPECIAL_TOKENS
from gmlp_scale.data.tokenizer import Tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.models import ModelConfig, ModernTransformerConfig

MODERNBERT = "modernbert"
"""The model_type."""
_FIELDS = {
    "num_blocks": "num_hidden_layers", "d_model": "hidden_size", "d_ffn": "intermediate_size",
    "num_heads": "num_attention_heads", "window": "local_attention", "global_every": "global_attn_every_n_layers",
    "global_theta": "global_rope_theta", "local_theta": "local_rope_theta", "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
}  # fmt: skip
"""ModernBERT's names of our fields. transformers 5 reads all; it writes layer_types and rope_parameters for three."""
_FIXED = {"hidden_activation": "gelu", "norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False}
_HEADS = ("head.", "decoder.", "classifier.")
_OUTSIDE = {
    "embedding": "embeddings.tok_embeddings",
    "blocks.0.attention_norm": "embeddings.norm",
    "norm": "final_norm",
}
_INSIDE = {
    "attention_norm": "attn_norm", "attention.qkv": "attn.Wqkv", "attention.out": "attn.Wo",
    "norm": "mlp_norm", "expand": "mlp.Wi", "project": "mlp.Wo",
}  # fmt: skip
"""ModernBERT's names of our modules, outside and inside a block, which is a layer there."""


def to_modernbert(
    config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and weights of a ModernBertForMaskedLM. InputError for what ModernBERT cannot be."""
    if not isinstance(config, ModernTransformerConfig) or config.norm != "layer_norm":
        raise InputError("only a modern_transformer with norm layer_norm can be a ModernBERT: leave --modernbert out")
    fields = {theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()}
    if config.window is None:
        fields |= {"local_attention": config.sequence_length, "global_attn_every_n_layers": 1}
    special = {"pad_token_id": PAD_ID, "cls_token_id": CLS_ID, "sep_token_id": SEP_ID}
    special |= {"bos_token_id": CLS_ID, "eos_token_id": SEP_ID, "tokenizer_sha256": tokenizer.sha256}
    head = {"architectures": ["ModernBertForMaskedLM"], "classifier_activation": "linear", "decoder_bias": False}
    gains, names = weights["norm.weight"], _their_names(config.num_blocks)
    if zeros := (gains == 0).nonzero().flatten().tolist():
        found = f"norm.weight is 0 in channels {zeros}"
        raise InputError(f"{found}, and ModernBERT's head would divide by it: leave --modernbert out")
    tensors = {f"model.{theirs}": weights[ours].contiguous() for ours, theirs in names.items()}
    # LayerNorm's result divided by its gains has mean 0 and variance 1, so the head's norm does no more than its gains.
    tensors |= {"head.dense.weight": torch.diag(1 / gains), "head.norm.weight": gains.clone()}
    return {"model_type": MODERNBERT, "dtype": "float32", **head, **fields, **_FIXED, **special}, tensors


def from_modernbert(
    found: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path, tokenizer: Tokenizer
) -> tuple[ModernTransformerConfig, dict[str, Tensor]]:
    """Our model and its weights, by name, of a folder's config.json and weights, whose names have no "model.".

    A tokenizer that config.json does not name is not the model's own. Then a piece gets the mean of the embeddings of
    the tokens into which the folder's tokenizer.json cuts its text.

    Raises:
        InputError: how the model differs from all that we have.
        LookupError, TypeError, AttributeError: a field of config.json, or the embedding, is missing or of another type,
            or a special token's id is not in the embedding.
    """
    if scaled := {name: found[name] for name in ("rope_scaling", "sliding_window") if found.get(name)}:
        raise InputError(f"found {scaled}; needed: none of them, as their positions are not ours")
    if rope := found.get("rope_parameters"):
        full, sliding = rope["full_attention"], rope.get("sliding_attention") or {"rope_theta": 10_000.0}
        found |= {"global_rope_theta": full["rope_theta"], "local_rope_theta": sliding["rope_theta"]}
        if {of.get("rope_type", "default") for of in (full, sliding)} != {"default"}:
            raise InputError(f"rope_parameters: found {rope}; needed: rope_type default")
    num_blocks = found["num_hidden_layers"]
    names = {theirs: ours for ours, theirs in _their_names(num_blocks).items()}
    if kinds := found.get("layer_types"):
        full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        every = full[1] if len(full) > 1 else num_blocks
        found |= {"global_attn_every_n_layers": every}
        if len(kinds) != num_blocks or full != list(range(0, num_blocks, every)):
            raise InputError(f"layer_types: found {kinds}; needed: {num_blocks}; each n-th, from the first on, is full")
    if wrong := {name: found[name] for name, value in _FIXED.items() if found.get(name, value) != value}:
        raise InputError(f"found {wrong}; needed: {_FIXED}")
    fields = {ours: found[theirs] for ours, theirs in _FIELDS.items()} | {"vocab_size": tokenizer.vocab_size}
    if fields["global_every"] == 1:  # no layer is local
        fields |= {"window": None, "global_every": ModernTransformerConfig.model_fields["global_every"].default}
    weights = {names.get(name, name): tensor for name, tensor in tensors.items() if not name.startswith(_HEADS)}
    if found.get("tokenizer_sha256") != tokenizer.sha256:
        special = {
            id: found.get(f"{name}_token_id") for id, name in ((PAD_ID, "pad"), (CLS_ID, "cls"), (SEP_ID, "sep"))
        }
        path = folder / "tokenizer.json"
        weights["embedding.weight"] = _fitted(weights["embedding.weight"], path, special, tokenizer)
    return ModernTransformerConfig(**fields), weights


def _fitted(old_VD: Tensor, path: Path, old_special: dict[int, int | None], tokenizer: Tokenizer) -> Tensor:
    """An embedding for the tokenizer's pieces. A byte that is no character gets the mean of all.

    old_special: by our id of a special token, the model's own id, if config.json names it.
    """
    from tokenizers import Tokenizer as FastTokenizer

    try:
        old, rows = FastTokenizer.from_file(str(path)), []
    except Exception as error:  # the library has no class for it
        raise InputError(f"{path}, with which the model was trained, cannot be read ({error}): copy it here") from error
    old.no_padding()
    if (num_tokens := old.get_vocab_size()) > len(old_VD):
        raise InputError(f"{path} has {num_tokens} tokens, the embedding {len(old_VD)}: they are not of one model")
    for id, piece in enumerate(tokenizer.pieces):
        ids = old.encode(piece.decode(errors="ignore"), add_special_tokens=False).ids
        if id < NUM_SPECIAL_TOKENS:
            named = old.token_to_id(f"[{SPECIAL_TOKENS[id].strip('<>').upper()}]")
            special = named if old_special.get(id) is None else old_special[id]
            ids = ids if special is None else [special]
        rows.append((old_VD[ids] if ids else old_VD).mean(0))
    return torch.stack(rows)


def _their_names(num_blocks: int) -> dict[str, str]:
    names = dict(_OUTSIDE)
    for index in range(num_blocks):
        for ours, theirs in _INSIDE.items():
            names.setdefault(f"blocks.{index}.{ours}", f"layers.{index}.{theirs}")
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}
