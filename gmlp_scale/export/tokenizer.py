"""The tokenizer of an export: tokenizer.json, the same unigram model for the `tokenizers` library, and its config.

Its ids are those of gmlp_scale.data.tokenizer.Tokenizer on every text, offsets included, but for one thing: it reads
the names of special tokens in a text as those tokens ("<mask>" is id 4), which fill-mask needs. Called with
split_special_tokens=True it takes them for text, as ours always does.

What needs care is that `tokenizers` has no notion of pieces that no text may match:
    The space is itself. Pieces hold blanks, not SentencePiece's U+2581, so a blank and a U+2581 stay two things.
    "<" is written "<U+2581" in the normalised text and in the pieces. So neither the text "<0x41>" nor "<mask>" is
        matched by the piece of that name.
    U+2581, which no piece may hold now, is written as its three byte tokens "<0xE2><0x96><0x81>".
Where no piece holds a "<", it is written as its byte token too.
"""

import json
from pathlib import Path

from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, SEP_ID, SPECIAL_TOKENS, UNK_ID
from gmlp_scale.data.tokenizer import NUM_BYTE_TOKENS, Tokenizer

_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_ESCAPED_LESS_THAN = "<" + _MARK


def write_tokenizer(folder: Path, tokenizer: Tokenizer, model_max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json; template `<cls> A <sep>` and `<cls> A <sep> B <sep>`."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name.strip('<>')}_token": token | {"__type": "AddedToken"} for name, token in _special_tokens().items()},
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer.json", _fast_tokenizer(tokenizer))
    _write_json(folder / "tokenizer_config.json", config)


def _fast_tokenizer(tokenizer: Tokenizer) -> dict:
    pieces, num_named = tokenizer.scored_pieces(), NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS
    ordinary = [(piece.replace("<", _ESCAPED_LESS_THAN), score) for piece, score in pieces[num_named:]]
    vocab = pieces[:num_named] + ordinary
    has_less_than = any("<" in piece for piece, _ in ordinary)
    less_than = _ESCAPED_LESS_THAN if has_less_than else _byte_names("<")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, **token} for id, token in enumerate(_special_tokens().values())],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "<"}, "content": less_than},
                {"type": "Replace", "pattern": {"Regex": f"(?<!<){_MARK}"}, "content": _byte_names(_MARK)},
            ],
        },
        # A run of characters that are in no piece would have one range of characters for all its bytes.
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": rf"<0x[0-9A-F]{{2}}>|{_any_character_but(ordinary)}"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": _template(),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                *([{"type": "Replace", "pattern": {"String": _ESCAPED_LESS_THAN}, "content": "<"}] * has_less_than),
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "Unigram",
            "unk_id": UNK_ID,
            "byte_fallback": True,
            "vocab": vocab,
        },
    }  # fmt: skip


def _any_character_but(pieces: list[tuple[str, float]]) -> str:
    """A regular expression for every character that no piece holds."""
    known = sorted(set().union(*(piece for piece, _ in pieces)))
    return "[^" + "".join(rf"\x{{{ord(character):X}}}" for character in known) + "]"


def _special_tokens() -> dict[str, dict]:
    """By name. The mask takes the place of the blank before it too, since a word's piece begins with that blank."""
    return {
        name: {
            "content": name, "single_word": False, "lstrip": name == "<mask>", "rstrip": False, "normalized": False,
            "special": True,
        }
        for name in SPECIAL_TOKENS
    }  # fmt: skip


def _template() -> dict:
    def special(id: int, type_id: int) -> dict:
        return {"SpecialToken": {"id": SPECIAL_TOKENS[id], "type_id": type_id}}

    first = [special(CLS_ID, 0), {"Sequence": {"id": "A", "type_id": 0}}, special(SEP_ID, 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, special(SEP_ID, 1)]
    names = {id: SPECIAL_TOKENS[id] for id in (CLS_ID, SEP_ID)}
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in names.items()},
    }


def _byte_names(text: str) -> str:
    return "".join(f"<0x{byte:02X}>" for byte in text.encode())


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
