"""Tokenizers of Hugging Face: a folder with tokenizer.json, and tokenizer_config.json where there is one.

The tokenizer's own template, with which it surrounds a text, says which tokens begin and end one: BERT's is
`[CLS] A [SEP]`, Llama's `<|begin_of_text|> A`, GPT-2 has none. tokenizer_config.json names the others.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np

from gmlp_scale.data.batch import SpecialIds
from gmlp_scale.data.tokenizer import JSON_NAME, NUM_BYTE_TOKENS, ForeignTokenizerError, Tokenizer, check_characters
from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import read_file

_CONFIG_NAME = "tokenizer_config.json"
_USUAL_NAMES = {"mask": ("[MASK]", "<mask>"), "pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "eos": ()}
"""The config of an older folder leaves its tokens to transformers' class."""


class JsonTokenizer:
    """The tokenizer.json in a folder, a path or a URL. As in Tokenizer, no text is ever encoded as a special token.

    Raises FileNotFoundError if there is none, InputError if it is broken.
    """

    def __init__(self, folder: str | Path):
        import tokenizers

        self._path, self.files = f"{folder}/{JSON_NAME}", (JSON_NAME,)
        content, config = read_file(self._path), b"{}"
        with suppress(FileNotFoundError):
            config = read_file(f"{folder}/{_CONFIG_NAME}")
            self.files += (_CONFIG_NAME,)
        self.sha256 = hashlib.sha256(content).hexdigest()
        try:
            self._model = tokenizers.Tokenizer.from_buffer(content)
            self._model.no_truncation()
            self._model.no_padding()
            encoding = self._model.encode("a")
        except Exception as error:  # the library has no class for it
            raise InputError(f"{self._path} is not a tokenizer that the library tokenizers reads ({error})") from error
        try:
            self._config = dict(json.loads(config))
        except (ValueError, TypeError) as error:
            raise InputError(f"{folder}/{_CONFIG_NAME} is not an object of JSON ({error})") from error
        self._model.encode_special_tokens = True
        self.vocab_size = 1 + max(self._model.get_vocab().values(), default=-1)
        added = self._model.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        self._mask_id, self._pad_id = self._id_of("mask"), self._id_of("pad")
        self.unknown_ids = [id for id in [self._id_of("unk")] if id is not None]
        self._hidden = [id for id in self._special.values() if id not in self.unknown_ids]
        names = (f"<0x{number:02X}>" for number in range(NUM_BYTE_TOKENS))
        self.byte_ids = [id for id in map(self._model.token_to_id, names) if id is not None]
        is_of_template = encoding.special_tokens_mask
        before, after = (way.index(0) if 0 in way else 0 for way in (is_of_template, is_of_template[::-1]))
        self._before, self._after = encoding.ids[:before], encoding.ids[len(encoding.ids) - after :]
        # A row of a model with masks begins with its [CLS]; for others each document begins with what the template has.
        self._first = np.array([] if self._mask_id is not None else self._before, np.int32)

    def special_ids(self, end_token: str | None = None) -> SpecialIds:
        """Documents end with `end_token` or, without it, the template's last token or the config's eos_token.

        InputError if none of these is there.
        """
        if end_token is not None:
            end = self._model.token_to_id(end_token)
        else:
            end = self._after[-1] if self._after else self._id_of("eos")
        if end is None:
            found = "no end token of its own" if end_token is None else f"no token {end_token}"
            raise InputError(
                f"{self._path} has {found}: give --end-token one of its tokens, which will stand behind each document; "
                f"its special tokens are {', '.join([*self._special][:20]) or 'none'}"
            )
        cls = self._before[0] if self._before and self._mask_id is not None else None
        pad = None if self._pad_id == end else self._pad_id
        roles = {id for id in (end, cls, pad, self._mask_id) if id is not None}
        return SpecialIds(end, cls, pad, self._mask_id, _ranges({*self._special.values(), *roles}))

    def encode(self, text: str) -> list[int]:
        """Ids of the text's tokens. InputError if the text holds a lone surrogate, which is no character."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text's tokens, int32 arrays; in front of them what the template of a model without masks has."""
        if not texts:
            return []
        try:
            encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as above
            check_characters(texts)
            raise InputError(f"{self._path} cannot encode a text ({error})") from error
        ends = np.cumsum([len(encoding) for encoding in encoded])
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encoded), np.int32, ends[-1])
        # Where the vocabulary itself holds a special token's name, as T5's does, the library matches it in texts.
        if (is_special := np.isin(ids, self._hidden)).any():
            if not self.unknown_ids:
                raise InputError(f"a text holds the name of a special token, and {self._path} has no unknown token")
            ids[is_special] = self.unknown_ids[0]
        return [np.concatenate([self._first, of_text]) for of_text in np.split(ids, ends[:-1])]

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens' text, with the names of special tokens."""
        return self._model.decode(list(ids), skip_special_tokens=False)

    def _id_of(self, role: str) -> int | None:
        """The id of the token that the config names, or else of a special token with a usual name."""
        named = self._config.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        if named is not None:
            if (id := self._model.token_to_id(named)) is None:
                raise InputError(
                    f"{self._path} has no token {named}, which {_CONFIG_NAME} has as {role}_token: give two files that "
                    "belong together"
                )
            return id
        return next((self._special[name] for name in _USUAL_NAMES[role] if name in self._special), None)


def _ranges(ids: set[int]) -> tuple[tuple[int, int], ...]:
    """The ids as ascending ranges [first, stop)."""
    firsts = sorted(id for id in ids if id - 1 not in ids)
    stops = sorted(id + 1 for id in ids if id + 1 not in ids)
    return tuple(zip(firsts, stops, strict=True))


AnyTokenizer = Tokenizer | JsonTokenizer


def open_tokenizer(folder: str | Path) -> AnyTokenizer:
    """The folder's tokenizer: that of train_tokenizer.py if it holds one, else its tokenizer.json.

    Some folders of Hugging Face have both files, and their tokenizer.model is not of train_tokenizer.py.
    """
    try:
        return Tokenizer(folder)
    except (FileNotFoundError, ForeignTokenizerError) as error:
        try:
            return JsonTokenizer(folder)
        except FileNotFoundError:
            raise type(error)(f"{error}; or give a folder with {JSON_NAME}") from error
