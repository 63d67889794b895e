import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmlp_scale.data.batch import NUM_SPECIAL_TOKENS
from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.errors import InputError

SENTENCE = "the cat and a dog went over to see what some people of that town had done with their old ship at sea"
WORDS = SENTENCE.split()
TEXTS = [f"{' '.join(WORDS[i % 7 :: 1 + i % 3])} {WORDS[i % 20]}ing, naïve café №{i}.\n\n  {i}" for i in range(500)]
SPECIAL = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<s>", "<0x41>"]
HARD = [
    "", " ", "   ", "\n", "\r\n", "\t", "a\tb", " lead", "trail ", "two  spaces", "\u2581", "a\u2581 \u2581\u2581b",
    "👩‍👩‍👧‍👦 family", "e\u0301 vs é", "ＦＵＬＬ　ｗｉｄｔｈ", "\u00a0nbsp", "\ufeffBOM", "\ufffd",
    "\x00nul\x00", "\u2047 ⁇", "\u2585",
    "日本語", "العربية", "한국어", "\U0010ffff", "\x7f\x80", "ﬁ ligature", "Å Å", "<mask> a <cls><sep> <pad>",
    "<0x0A>\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 400, folder)
    return Tokenizer(folder)


def check(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(NUM_SPECIAL_TOKENS <= id < tokenizer.vocab_size for id in ids)
    assert len(ids) == len(offsets)
    place = 0
    for id, (start, end) in zip(ids, offsets, strict=True):
        assert start < end and start <= place <= end  # no gap
        place = end
        if "\ufffd" not in tokenizer.decode([id]):
            assert tokenizer.decode([id]) == text[start:end]
        else:
            assert end - start == 1  # a byte of one character
    assert place == len(text)


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_whole(tokenizer, text):
    check(tokenizer, text)


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(WORDS + SPECIAL + HARD)), max_size=12).map("".join))
def test_any_text_comes_back_whole(tokenizer, text):
    check(tokenizer, text)


@given(st.lists(st.sampled_from(HARD + WORDS), max_size=6))
def test_batches_equal_single_texts(tokenizer, texts):
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


def test_offsets_point_at_words(tokenizer):
    text = "naïve 👩 the dog"
    ids, offsets = tokenizer.encode_with_offsets(text)
    covering = [i for i, (start, end) in enumerate(offsets) if start < 15 and end > 12]
    assert tokenizer.decode([ids[i] for i in covering]).strip() == "dog"


def test_special_tokens_decode_by_name(tokenizer):
    assert tokenizer.decode([2, *tokenizer.encode("the dog"), 4, 3, 0]) == "<cls>the dog<mask><sep><pad>"


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(ValueError, match="lone surrogate"):
        tokenizer.encode(json.loads(r'"\u2581\udfff"'))


def test_training_is_deterministic(tokenizer, tmp_path):
    train_tokenizer(TEXTS, 400, tmp_path)
    assert Tokenizer(tmp_path).sha256 == tokenizer.sha256
    assert Tokenizer(tmp_path).vocab_size == 400


def test_too_little_text_for_the_vocabulary_is_one_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"a tokenizer of 30000 pieces cannot be trained.*value <= "):
        train_tokenizer(TEXTS, 30_000, tmp_path)
    with pytest.raises(ValueError, match="a tokenizer of 400 pieces cannot be trained"):
        train_tokenizer([], 400, tmp_path)


def test_what_is_not_our_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"hello")
    with pytest.raises(InputError, match=r"tokenizer\.model is a file: give the tokenizer's folder"):
        Tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        Tokenizer(tmp_path)
    import sentencepiece

    for settings, message in (
        ({}, "other special tokens"),
        ({"byte_fallback": True, "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1,
          "control_symbols": ["<cls>", "<sep>", "<mask>"]}, "alters text"),
    ):  # fmt: skip
        with open(tmp_path / "tokenizer.model", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=400, minloglevel=2, **settings
            )
        with pytest.raises(ValueError, match=message):
            Tokenizer(tmp_path)
