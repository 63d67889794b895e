"""The tokenizer: a cased SentencePiece unigram model with byte fallback that loses nothing.

Nothing is normalised: decode(encode(text)) == text for every Unicode text. So the tokens' pieces, one after another,
are the text's own bytes, and character offsets follow from the pieces' lengths. Special tokens are control symbols: no
text, not even "<mask>", is ever encoded as one.

A piece has a space only as its first character, so a text's tokens are the tokens of its words, one word after another.
That is why a batch of texts can be encoded by its distinct words.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS, OUR_SPECIAL_IDS, PAD_ID, SPECIAL_TOKENS, UNK_ID, SpecialIds
from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import read_file, write_file

MODEL_NAME, JSON_NAME = "tokenizer.model", "tokenizer.json"
NUM_BYTE_TOKENS = 256
"""The ids after the special tokens are single bytes; they encode characters that no piece holds."""

_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes a space as this character; a text may hold it too
_WORDS_AT_A_TIME = 1024  # few enough for exact sums of scores, see _with_rounded_scores
_MAX_SENTENCE_CHARACTERS = 1000  # 4000 bytes at most; the trainer drops sentences of more than 4192


class ForeignTokenizerError(InputError):
    """A tokenizer.model that data_prep/train_tokenizer.py did not write."""


class Tokenizer:
    """The tokenizer in a folder, a path or a URL. FileNotFoundError or InputError if it holds none that we trained."""

    files = (MODEL_NAME,)
    """What a copy of it needs."""
    unknown_ids = (UNK_ID,)
    byte_ids = range(NUM_SPECIAL_TOKENS, NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS)

    def __init__(self, folder: str | Path):
        import sentencepiece  # which a dry run does without

        path = f"{folder}/{MODEL_NAME}"
        try:
            model = read_file(path)
        except FileNotFoundError as error:
            found = f"{path} does not exist; data_prep/train_tokenizer.py writes it"
            with suppress(FileNotFoundError):
                read_file(f"{folder}/{JSON_NAME}")
                found += f". {folder} holds {JSON_NAME} alone, which rows can be written with, but this needs more"
            raise FileNotFoundError(f"no tokenizer at {folder}: {found}") from error
        except NotADirectoryError as error:
            raise InputError(f"{folder} is a file: give the tokenizer's folder, which holds {MODEL_NAME}") from error
        self.sha256 = hashlib.sha256(model).hexdigest()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise InputError(f"{path} is not a SentencePiece model ({error})") from error
        self.vocab_size = self._model.get_piece_size()
        names = [self._model.id_to_piece(id) for id in range(self.vocab_size)]
        bytes_begin, bytes_end = NUM_SPECIAL_TOKENS, NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS
        if tuple(names[:bytes_begin]) != SPECIAL_TOKENS or not all(
            map(self._model.is_byte, range(bytes_begin, bytes_end))
        ):
            raise ForeignTokenizerError(
                f"{path} has other special tokens or no byte fallback; train one with data_prep/train_tokenizer.py"
            )
        self.pieces = [piece.replace(_SPACE_MARK, " ").encode() for piece in names]
        """The bytes of each token, by id. A special token has those of its name."""
        self.pieces[bytes_begin:bytes_end] = [bytes([number]) for number in range(NUM_BYTE_TOKENS)]
        if any(b" " in content[1:] for content in self.pieces):
            raise ForeignTokenizerError(
                f"{path} has pieces of several words; train one with data_prep/train_tokenizer.py"
            )
        self._begins_word = np.array([content.startswith(b" ") for content in self.pieces])
        self._num_bytes_of_id = np.array([len(content) for content in self.pieces])
        self._space_mark_ids = np.frombuffer(_SPACE_MARK.encode(), np.uint8).astype(np.int32) + bytes_begin
        probe = f"  a\t{_SPACE_MARK}\r\n\N{FULLWIDTH LATIN CAPITAL LETTER A}e\N{COMBINING ACUTE ACCENT}<mask> "
        if self.decode(self.encode(probe)) != probe:
            raise ForeignTokenizerError(f"{path} alters text; train one with data_prep/train_tokenizer.py")

    def special_ids(self, end_token: str | None = None) -> SpecialIds:
        """InputError if an end token is asked for, since it has one."""
        if end_token is not None:
            raise InputError(f"--end-token is {end_token}; a tokenizer of train_tokenizer.py ends documents with <sep>")
        return OUR_SPECIAL_IDS

    def encode(self, text: str) -> list[int]:
        """Ids of the text's tokens. InputError if the text holds a lone surrogate, which is no character."""
        return self._encode_whole([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text's tokens, int32 arrays, as `encode` gives them; faster for long batches."""
        import pyarrow
        import pyarrow.compute

        if not texts:
            return []
        try:
            words_of_texts = pyarrow.compute.split_pattern(pyarrow.array(texts, pyarrow.large_string()), " ")
        except UnicodeEncodeError:
            check_characters(texts)
            raise
        ends_of_texts = words_of_texts.offsets.to_numpy()
        places_of_first_words, words = ends_of_texts[:-1], words_of_texts.values
        distinct = words.dictionary_encode()
        encoded_first_words = self._encode_whole(words.take(pyarrow.array(places_of_first_words)).to_pylist())
        encoded, num_tokens = self._encode_after_spaces(distinct.dictionary.to_pylist())

        number_of_word = distinct.indices.to_numpy(zero_copy_only=False).copy()  # first words come after the others
        number_of_word[places_of_first_words] = len(num_tokens) + np.arange(len(texts))
        tokens = np.concatenate([encoded, *encoded_first_words])
        num_tokens = np.concatenate([num_tokens, [len(ids) for ids in encoded_first_words]]).astype(np.int64)
        starts = np.cumsum(num_tokens) - num_tokens
        num_tokens_here = num_tokens[number_of_word]
        ends_here = np.cumsum(num_tokens_here)
        shift = np.repeat(starts[number_of_word] - (ends_here - num_tokens_here), num_tokens_here)
        ids = tokens[np.arange(len(shift)) + shift]
        return np.split(ids, ends_here[ends_of_texts[1:-1] - 1])

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text's tokens, and for each token the range [start, end) of characters whose bytes it holds.

        The ranges cover the text without a gap. They overlap only where a character's bytes are several tokens.
        """
        ids = self.encode(text)
        ends = np.cumsum(self._num_bytes_of_id[ids])
        starts = ends - self._num_bytes_of_id[ids]
        is_first_byte = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
        character_of_byte = np.cumsum(is_first_byte) - 1
        offsets = np.stack([character_of_byte[starts], character_of_byte[ends - 1] + 1], axis=1)
        return ids, [tuple(pair) for pair in offsets.tolist()]

    def decode(self, ids: Iterable[int]) -> str:
        """The tokens' text. Special tokens give their names, bytes that form no character give U+FFFD."""
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", errors="replace")

    def scored_pieces(self) -> list[tuple[str, float]]:
        """For every id its text, with spaces as spaces, and its score (the log-probability of an ordinary piece).

        The text of special and byte tokens, the first NUM_SPECIAL_TOKENS + NUM_BYTE_TOKENS ids, is their name.
        """
        return [
            (self._model.id_to_piece(id).replace(_SPACE_MARK, " "), self._model.get_score(id))
            for id in range(self.vocab_size)
        ]

    def _encode_whole(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text's tokens, int32 arrays, by SentencePiece. ValueError as in `encode`."""
        try:
            encoded = self._model.encode(texts, return_type="numpy", num_threads=1)
        except (RuntimeError, TypeError) as error:
            check_characters(texts)
            raise AssertionError(error) from error
        for number, text in enumerate(texts):
            if _SPACE_MARK in text:
                encoded[number] = self._encode_around_space_marks(text)
        return encoded

    def _encode_after_spaces(self, words: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of `" word"` for all words, one after another, and the number of ids of each word."""
        parts = (words[start : start + _WORDS_AT_A_TIME] for start in range(0, len(words), _WORDS_AT_A_TIME))
        ids = np.concatenate(self._encode_whole([" " + " ".join(part) for part in parts]))
        return ids, np.diff(np.flatnonzero(self._begins_word[ids]), append=len(ids))

    def _encode_around_space_marks(self, text: str) -> np.ndarray:
        parts = self._model.encode(text.split(_SPACE_MARK), return_type="numpy", num_threads=1)
        between = [piece for part in parts[:-1] for piece in (part, self._space_mark_ids)]
        return np.concatenate([*between, parts[-1]])


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Train on `texts` and write TOKENIZER_DIR/tokenizer.model. No piece reaches across the end of a line.

    The same texts give the same bytes. InputError if the texts are too few for the vocabulary.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in _training_lines(text)),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            pad_id=PAD_ID,
            pad_piece=SPECIAL_TOKENS[PAD_ID],
            unk_id=UNK_ID,
            unk_piece=SPECIAL_TOKENS[UNK_ID],
            bos_id=-1,
            eos_id=-1,
            control_symbols=list(SPECIAL_TOKENS[UNK_ID + 1 :]),
            num_threads=16,  # each thread sums a part, so another number of threads gives another model
            minloglevel=1,
        )
    except RuntimeError as error:
        raise InputError(f"a tokenizer of {vocab_size} pieces cannot be trained on this input: {error}") from error
    write_file(f"{folder}/{MODEL_NAME}", _with_rounded_scores(model.getvalue()))


def _with_rounded_scores(model: bytes) -> bytes:
    """The model with its pieces' log-probabilities rounded to multiples of 1/64.

    SentencePiece sums them in float32 from the start of a text. Sums of multiples of 1/64 are exact up to 2**18 (some
    100,000 characters), so the way a word is cut does not depend on its distance from the start.
    """
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    proto = ModelProto.FromString(model)
    for piece in proto.pieces:
        piece.score = round(piece.score * 64) / 64
    return proto.SerializeToString(deterministic=True)


def _training_lines(text: str) -> Iterable[str]:
    for line in text.replace(_SPACE_MARK, " ").replace("\0", " ").splitlines():
        for start in range(0, len(line), _MAX_SENTENCE_CHARACTERS):
            yield line[start : start + _MAX_SENTENCE_CHARACTERS]


def check_characters(texts: Iterable[str]) -> None:
    """Raises InputError if a text cannot be encoded."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text has a lone surrogate at character {error.start}, which is no character"
            ) from error
