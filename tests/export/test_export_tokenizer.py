"""tokenizer.json has the ids and offsets of the SentencePiece model, on any text."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.export.fast_tokenizer import write_tokenizer

VALID = Path(__file__).parents[3] / "shared" / "data" / "pretrain" / "valid-00000-of-00001.jsonl.gz"
NAMES = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", "<0x41>", "<0xE2><0x96><0x81>", "<s>"]
TORTURE = [
    "", " ", "   ", "\n", "\r\n", "\t", "a\tb", " lead", "trail ", "two  spaces", "a\u00a0b\u2003c\u3000d", "\u2028",
    "\u2581", "a\u2581 \u2581\u2581b", " \u2581the \u2581 cat", "<", "<<", "<\u2581", "\u2581<", "<\u2581<\u2581\u2581",
    "a<b> <b>the</b>", *NAMES, "".join(NAMES), *[f"the {name} cat{name}dog" for name in NAMES], "<0x4", "0x41>",
    "<\u25810x41>", "< mask>", "<<mask>>", "👩‍👩‍👧‍👦 family 🇩🇪🏴‍☠️", "e\u0301 vs é, a\u0300\u0301\u0302",
    "Z̸̢̛͍͎a̶l̵g̷o̸", "ＦＵＬＬ　ｗｉｄｔｈ", "ﬁ ﬂ Å Å ½ ²", "\ufeffBOM", "\ufffd", "\x00nul\x00", "\x01\x1f\x7f\x80\x85\x9f",
    "\u200b\u200c\u200d\u200e\u202e", "\ue000\uf8ff", "\ufdd0\uffff", "日本語のテキスト", "العربية שלום",
    "한국어 \u1112\u1161\u11ab", "Ελληνικά Кириллица", "हिन्दी ไทย", "\U0001f600\U0010ffff\U00020000",
    "ı İ ß ẞ ſ ς", "naïve naïve café", "cat" * 300, "日" * 300, "\u2581" * 50, " " * 50, "<" * 50,
]  # fmt: skip


@pytest.fixture(scope="module")
def write_and_load(tmp_path_factory):
    """write_and_load(tokenizer) -> the tokenizer that transformers makes of its files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        from transformers import PreTrainedTokenizerFast

    def load(tokenizer: Tokenizer) -> "PreTrainedTokenizerFast":
        folder = tmp_path_factory.mktemp("fast")
        write_tokenizer(folder, tokenizer, model_max_length=64)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    return load


@pytest.fixture(scope="module")
def pairs(tokenizer_folder, tmp_path_factory, write_and_load):
    """(ours, transformers') of a tokenizer with pieces that hold a "<", and of one with few characters and no "<"."""
    plain = tmp_path_factory.mktemp("plain")
    train_tokenizer(["the cat and the dog went over the sea"] * 50, 275, plain)
    tokenizers = [Tokenizer(folder) for folder in (tokenizer_folder, plain)]
    has_less_than = [any("<" in piece for piece, _ in tokenizer.scored_pieces()[261:]) for tokenizer in tokenizers]
    assert has_less_than == [True, False]
    return [(tokenizer, write_and_load(tokenizer)) for tokenizer in tokenizers]


def check(pairs, text: str) -> None:
    for tokenizer, fast in pairs:
        encoded = fast(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
        ids, offsets = tokenizer.encode_with_offsets(text)
        assert encoded["input_ids"] == ids
        assert [tuple(pair) for pair in encoded["offset_mapping"]] == offsets
        assert fast.decode(ids) == text


@pytest.mark.parametrize("text", TORTURE, ids=lambda text: ascii(text)[:30])
def test_torture_texts(pairs, text):
    check(pairs, text)


@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from(TORTURE)), max_size=8).map("".join))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_any_text(pairs, text):
    check(pairs, text)


@pytest.mark.skipif(not VALID.exists(), reason=f"{VALID} is not there")
def test_real_texts(tmp_path, write_and_load):
    """The same ids however far into a text: train_tokenizer rounds the scores so that float32 adds them exactly."""
    with gzip.open(VALID, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) > 400
    train_tokenizer(texts[::24], 1500, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    encoded = write_and_load(tokenizer)(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    for found, expected in zip(encoded["input_ids"], tokenizer.encode_batch(texts), strict=True):
        assert found == expected.tolist()


def test_special_tokens_and_templates(pairs):
    tokenizer, fast = pairs[0]
    assert [getattr(fast, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")] == [0, 1, 2, 3, 4]
    assert fast.model_max_length == 64
    a, b = tokenizer.encode("the cat"), tokenizer.encode("a dog")
    assert fast("the cat") == {"input_ids": [2, *a, 3], "attention_mask": [1] * (len(a) + 2)}
    assert fast("the cat", "a dog")["input_ids"] == [2, *a, 3, *b, 3]
    assert fast("the cat", "a dog").sequence_ids(0) == [None, *[0] * len(a), None, *[1] * len(b), None]
    assert fast("the <mask> cat")["input_ids"] == [2, *tokenizer.encode("the"), 4, *tokenizer.encode(" cat"), 3]
    assert len(fast("the cat " * 100, truncation=True)["input_ids"]) == 64
