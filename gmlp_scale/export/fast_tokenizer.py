"""The tokenizer of an export: tokenizer.json, the same unigram model for the `tokenizers` library, and its config.

On every text it gives the ids and offsets of gmlp_scale.data.tokenizer.Tokenizer, with one exception: it reads the
names of special tokens in a text as those tokens ("<mask>" is id 4), which fill-mask needs. With
split_special_tokens=True it takes them for text, as our tokenizer always does.

`tokenizers` lets a text match every piece, the names of special and byte tokens too. So the texts are escaped:
    A space stays a space, in texts and in pieces. SentencePiece's stand-in for it, U+2581, is another character.
    "<" becomes "<U+2581", in texts and in ordinary pieces. Then no text "<0x41>" or "<mask>" is matched by the piece of
        that name.
    U+2581, which no piece may hold now, becomes its three byte tokens "<0xE2><0x96><0x81>".
If no piece holds a "<", it becomes its byte token too.
"""

import json
from pathlib import Path

from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, SEP_ID, SPECIAL_TOKENS, UNK_ID
from gmlp_scale.data.tokenizer import NUM_BYTE_TOKENS, Tokenizer

_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_ESCAPED_LESS_THAN = "<" + _MARK


def write_tokenizer(folder: Path, tokenizer: Tokenizer, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Texts become `<cls> A <sep>` or `<cls> A <sep> B <sep>`."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as FastTokenizer

    pieces, num_named = tokenizer.scored_pieces(), NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS
    ordinary = [(piece.replace("<", _ESCAPED_LESS_THAN), score) for piece, score in pieces[num_named:]]
    has_less_than = any("<" in piece for piece, _ in ordinary)

    fast = FastTokenizer(models.Unigram(pieces[:num_named] + ordinary, unk_id=UNK_ID, byte_fallback=True))
    fast.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("<", _ESCAPED_LESS_THAN if has_less_than else _byte_names("<")),
            normalizers.Replace(Regex(f"(?<!<){_MARK}"), _byte_names(_MARK)),
        ]
    )
    # Each character that no piece holds stands alone: in a run of them, all bytes would have the offsets of the run.
    alone = Regex(rf"<0x[0-9A-F]{{2}}>|{_any_character_but(ordinary)}")
    fast.pre_tokenizer = pre_tokenizers.Split(alone, behavior="isolated")
    cls, sep = SPECIAL_TOKENS[CLS_ID], SPECIAL_TOKENS[SEP_ID]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=[(cls, CLS_ID), (sep, SEP_ID)]
    )
    unescaped = [decoders.Replace(_ESCAPED_LESS_THAN, "<")] if has_less_than else []
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), *unescaped, decoders.Fuse()])
    # A word's piece begins with the space before it, so <mask> takes that space too.
    special = [AddedToken(name, lstrip=name == "<mask>", normalized=False, special=True) for name in SPECIAL_TOKENS]
    fast.add_special_tokens(special)
    fast.save(str(folder / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{token.content.strip('<>')}_token": token.__getstate__() | {"__type": "AddedToken"} for token in special},
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, ensure_ascii=False, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _any_character_but(pieces: list[tuple[str, float]]) -> str:
    """A regular expression for every character that no piece holds."""
    known = sorted(set().union(*(piece for piece, _ in pieces)))
    return "[^" + "".join(rf"\x{{{ord(character):X}}}" for character in known) + "]"


def _byte_names(text: str) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in text.encode())
