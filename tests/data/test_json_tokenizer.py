"""Tokenizers of Hugging Face: against transformers on the same files, and rows of theirs through RowLoader."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models

from gmlp_scale.data.batch import OUR_SPECIAL_IDS, SpecialIds
from gmlp_scale.data.json_tokenizer import JsonTokenizer, open_tokenizer
from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.export.fast_tokenizer import write_tokenizer
from tests import json_tokenizers
from tests.data_prep.corpora import make_texts
from tests.json_tokenizers import END

TEXTS = [*make_texts(40), "naïve 日本 <s> </s> [SEP] [MASK] <|endoftext|> <mask>\n", "x"]


@pytest.mark.parametrize(("kind", "num_ids"), [("gpt2", 400), ("bert", 300), ("llama", 70_000)])
def test_ids_and_texts_are_those_of_transformers_without_special_tokens(kind, num_ids, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = open_tokenizer(getattr(json_tokenizers, kind)(tmp_path))
    theirs = PreTrainedTokenizerFast(tokenizer_file=f"{tmp_path}/tokenizer.json")
    texts = TEXTS if kind != "llama" else make_texts(40)
    first = [1] if kind == "llama" else []
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True, truncation=False).input_ids
        assert ids.dtype == np.int32 and ids.tolist() == first + expected == tokenizer.encode(text)
        text_of_theirs = theirs.decode(expected, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids[len(first) :].tolist()) == text_of_theirs
    assert tokenizer.encode_batch([]) == [] and tokenizer.vocab_size == num_ids


def test_the_template_the_config_and_the_option_say_what_the_special_tokens_are(tmp_path):
    bert = json_tokenizers.bert(tmp_path / "bert")
    assert open_tokenizer(bert).special_ids() == SpecialIds(9, 8, 0, 10, ((0, 1), (7, 11)))
    assert open_tokenizer(bert).special_ids("[unused2]").end == 3
    llama = open_tokenizer(json_tokenizers.llama(tmp_path / "llama"))
    assert llama.special_ids() == SpecialIds(2, None, None, None, ((0, 3),)) and llama.unknown_ids == [0]
    gpt2 = json_tokenizers.gpt2(tmp_path / "gpt2", eos_token=END, pad_token=END)
    assert open_tokenizer(gpt2).special_ids() == SpecialIds(0, None, None, None, ((0, 1),))
    (gpt2 / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match=r"no end token of its own: give --end-token .* special tokens are <\|endof"):
        open_tokenizer(gpt2).special_ids()
    with pytest.raises(InputError, match="has no token <eos>: give --end-token"):
        open_tokenizer(gpt2).special_ids("<eos>")
    assert open_tokenizer(gpt2).special_ids(END).end == 0


def test_no_text_gives_a_special_token_even_where_the_vocabulary_has_its_name(tmp_path):
    for kind in ("gpt2", "bert", "llama"):
        tokenizer = open_tokenizer(getattr(json_tokenizers, kind)(tmp_path / kind))
        special = tokenizer.special_ids(END if kind == "gpt2" else None)
        ids = tokenizer.encode("the [SEP] </s> <s> [CLS] cat <|endoftext|>")[len(tokenizer.encode("")) :]
        hidden = special.among(np.array(ids)) & ~np.isin(ids, tokenizer.unknown_ids)
        assert len(ids) > 5 and not hidden.any()
    vocabulary = {name: id for id, name in enumerate(["a", "<", "e", ">", "<e", "<e>"])}
    merging = Library(models.BPE(vocabulary, [("<", "e"), ("<e", ">")]))
    merging.add_special_tokens(["<e>"])
    with pytest.raises(InputError, match=r"holds the name of a special token, and .* has no unknown token"):
        open_tokenizer(json_tokenizers.save(merging, tmp_path / "merging")).encode("a<e>a")


def test_a_folder_with_both_files_has_our_tokenizer_if_it_is_ours(tmp_path):
    train_tokenizer(make_texts(600), 400, tmp_path)
    ours = Tokenizer(tmp_path)
    write_tokenizer(tmp_path, ours, 32)
    assert type(open_tokenizer(tmp_path)) is Tokenizer and ours.special_ids() == OUR_SPECIAL_IDS
    with pytest.raises(InputError, match=r"--end-token is x; a tokenizer of train_tokenizer\.py ends documents with"):
        ours.special_ids("x")
    model = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model[:100])
    with pytest.raises(InputError, match=r"tokenizer\.model is not a SentencePiece model"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model.replace(b"<sep>", b"</s>>"))
    exported = open_tokenizer(tmp_path)
    assert type(exported) is JsonTokenizer and exported.special_ids() == OUR_SPECIAL_IDS
    assert [exported.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]
    (tmp_path / "tokenizer.model").unlink()
    assert type(open_tokenizer(tmp_path)) is JsonTokenizer
    with pytest.raises(FileNotFoundError, match=r"holds tokenizer\.json alone, which rows can be written with, but"):
        Tokenizer(tmp_path)


def test_mistakes_are_one_clear_message(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no tokenizer at .*train_tokenizer\.py writes it; or give a folder with"
    ):
        open_tokenizer(tmp_path)
    gpt2 = json_tokenizers.gpt2(tmp_path, eos_token=END)
    whole = (gpt2 / "tokenizer.json").read_bytes()
    for content in (whole[:-20], b"", b"{}", b"[1]", b"\xff\xfe", whole.replace(b'"BPE"', b'"XPE"')):
        (gpt2 / "tokenizer.json").write_bytes(content)
        with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer that the library tokenizers reads"):
            open_tokenizer(gpt2)
    (gpt2 / "tokenizer.json").write_bytes(whole)
    for content in ("[1]", "{", '"eos_token"'):
        (gpt2 / "tokenizer_config.json").write_text(content)
        with pytest.raises(InputError, match=r"tokenizer_config\.json is not an object of JSON"):
            open_tokenizer(gpt2)
    (gpt2 / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    with pytest.raises(InputError, match=r"has no token <pad>, which tokenizer_config\.json has as pad_token"):
        open_tokenizer(gpt2)
    (gpt2 / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="lone surrogate at character 1"):
        open_tokenizer(gpt2).encode("a\ud800")
    with pytest.raises(InputError, match=r"is a file: give the tokenizer's folder"):
        open_tokenizer(gpt2 / "tokenizer.json")
