"""Rows of tokenizers of Hugging Face: written, verified, shown and read by RowLoader."""

import ast
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from gmlp_scale.data.batch import IGNORED, OUR_SPECIAL_IDS
from gmlp_scale.data.json_tokenizer import open_tokenizer
from gmlp_scale.data.manifest import ShardError
from gmlp_scale.data.rows import RowLoader, Rows
from gmlp_scale.data.shards import Manifest
from gmlp_scale.prepare.write_shards import is_heldout
from gmlp_scale.storage.files import write_text
from tests import json_tokenizers
from tests.data_prep.corpora import REPOSITORY, contents, make_texts, run
from tests.data_prep.test_tokenize_corpus import all_rows, report_of
from tests.forked import Script
from tests.json_tokenizers import END
from tests.written_shards import change_manifest

TEXTS = [text for number in range(3) for text in make_texts(300, number)]


@pytest.fixture
def tokenize(corpus, tmp_path):
    """tokenize(tokenizer folder, options...) -> what the script printed; the shards are in tmp_path/out."""

    def tokenize(folder, *options, **settings):
        return run("tokenize_corpus.py", "--input", f"{corpus}/*.gz", "--tokenizer", folder, "--sequence-length", 32,
                   "--output", tmp_path / "out", "--heldout-fraction", 0.1, "--shard-bytes", 20_000, *options,
                   **settings)  # fmt: skip

    return tokenize


def overrides(out) -> list[str]:
    manifest = Manifest.load(out)
    return [f"data.shards={out}", f"model.vocab_size={manifest.vocab_size}", "model.sequence_length=32",
            "train.global_batch_size=4", "train.micro_batch_size=2", f"data.packing={manifest.packing}"]  # fmt: skip


def inspected(out, step=2) -> str:
    return run("inspect_batch.py", "--config", REPOSITORY / "configs/pretrain/smoke.yaml", "--step", step,
               *overrides(out))  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_rows_are_the_stream_of_documents_with_the_end_token_between(kind, tokenize, tmp_path):
    folder = getattr(json_tokenizers, kind)(tmp_path / "tokenizer", **({"eos_token": END} if kind == "gpt2" else {}))
    tokenizer, out = open_tokenizer(folder), tmp_path / "out"
    end = tokenizer.special_ids().end
    printed = tokenize(folder, "--tasks", 3)
    manifest = Manifest.load(out)
    assert manifest.tokenizer_sha256 == tokenizer.sha256 and manifest.special == tokenizer.special_ids()
    dtype = {"gpt2": "uint16", "llama": "uint32"}[kind]
    assert manifest.dtype == f"{dtype} little endian" and manifest.row_dtype.name == dtype
    for split, held in (("train", False), ("heldout", True)):
        rows = all_rows(out, split)
        assert rows.dtype == manifest.row_dtype and rows.shape[1] == 32
        stream = rows.reshape(-1)
        found = [ids.tolist() for ids in np.split(stream, np.flatnonzero(stream == end) + 1)]
        expected = [text for text in TEXTS if is_heldout(text.encode(), 0.1) == held]
        assert sorted(ids for ids in found if len(ids) > 1) == sorted(
            [*tokenizer.encode(text), end] for text in expected
        )
        assert sum(ids == [end] for ids in found) < 3 * 32  # each task fills its last row
    report = report_of(out)
    assert (report["tokenizer"], report["end_token"]) == ("tokenizer.json", {"gpt2": END, "llama": "</s>"}[kind])
    assert "byte fallback rate" in printed and report["unknown_rate"] == 0
    assert "0 problems" in run("verify_shards.py", out)
    (batch,) = RowLoader(Rows(str(out), global_batch_size=manifest.num_rows("train")), num_steps=1, documents=True)
    ids, labels = batch["input_ids"], batch["labels"]
    assert sorted(map(tuple, ids.tolist())) == sorted(map(tuple, all_rows(out, "train").tolist()))
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[:, 1:] = ids[:, :-1] == end
    assert torch.equal(batch["position_ids"] == 0, is_start)
    assert torch.equal(labels, ids.masked_fill(is_start, IGNORED))
    (plain,) = RowLoader(Rows(str(out), global_batch_size=manifest.num_rows("train")), num_steps=1)
    is_filler = torch.zeros_like(is_start)
    is_filler[:, 1:] = (ids[:, 1:] == end) & (ids[:, :-1] == end)
    assert is_filler.any() and torch.equal(plain["labels"], ids.masked_fill(is_filler, IGNORED))
    with pytest.raises(ShardError, match="has no mask token, so nothing can be masked: train a causal model on"):
        RowLoader(Rows(str(out)), masked_fraction=0.15)
    shown = inspected(out)
    rows = Rows(str(out), global_batch_size=4, seed=0)
    texts = [ast.literal_eval(text) for text in re.findall(r"^  text   (.*)$", shown, re.MULTILINE)]
    assert texts == [tokenizer.decode(row.tolist()) for row in rows.__getitems__(range(8, 12))] and "masks" not in shown
    before = contents(out)
    assert tokenize(folder, "--tasks", 3) and contents(out) == before


@pytest.mark.parametrize("packing", ["packed", "document"])
def test_rows_of_an_encoder_are_masked_by_its_own_special_tokens(packing, tokenize, tmp_path):
    folder, out = json_tokenizers.bert(tmp_path / "tokenizer"), tmp_path / "out"
    tokenizer = open_tokenizer(folder)
    special = tokenizer.special_ids()
    tokenize(folder, "--packing", packing)
    rows = all_rows(out, "train")
    assert (rows[:, 0] == special.cls).all() and (rows[:, 1:] != special.cls).all()
    tokens = rows[:, 1:][rows[:, 1:] != special.pad]
    *found, rest = np.split(tokens, np.flatnonzero(tokens == special.end) + 1)
    if packing == "packed":
        expected = [tokenizer.encode(text) for text in TEXTS if not is_heldout(text.encode(), 0.1)]
        assert sorted(ids[:-1].tolist() for ids in found) == sorted(expected) and not len(rest)
    assert "0 problems" in run("verify_shards.py", out)
    num_rows = len(rows)
    loader = RowLoader(Rows(str(out), global_batch_size=num_rows), masked_fraction=0.15, num_steps=40)
    hidden, shown = [], []
    for batch in loader:
        is_label = batch["labels"] != IGNORED
        hidden.append(batch["labels"][is_label])
        shown.append(batch["input_ids"][is_label])
        assert is_label.sum(dim=1).max() == 5
        is_token = batch.get("attention_mask", torch.ones_like(is_label))
        assert torch.equal(is_token == 0, batch["input_ids"] == special.pad) or packing == "packed"
    hidden, shown = torch.cat(hidden).numpy(), torch.cat(shown).numpy()
    assert not special.among(hidden).any()
    assert (shown == special.mask).mean() == pytest.approx(0.8, abs=0.01)
    drawn = shown[(shown != special.mask) & (shown != hidden)]
    assert len(drawn) / len(shown) == pytest.approx(0.1, abs=0.01)
    assert {*drawn.tolist()} == {*range(tokenizer.vocab_size)} - {0, 7, 8, 9, 10}
    assert inspected(out).count("[MASK]") > 4


def test_a_model_of_ours_pretrains_and_evaluates_on_them(tokenize, tmp_path):
    tokenize(json_tokenizers.bert(tmp_path / "tokenizer"))
    places = [*overrides(tmp_path / "out"), f"output_dir={tmp_path}", "name=run", "train.num_steps=3",
              "optimizer.warmup_steps=1", "train.num_evaluation_rows=4"]  # fmt: skip
    smoke = REPOSITORY / "configs/pretrain/smoke.yaml"
    code, printed, errors = Script("launch/pretrain.py", ["--config", smoke, *places, "engine.kind=single"]).end()
    assert code == 0, printed + errors
    evaluation = ["--run", tmp_path / "run", "--shards", tmp_path / "out"]
    code, printed, errors = Script("launch/evaluate.py", evaluation).end()
    assert code == 0 and "perplexity" in printed + errors, printed + errors
    code, printed, errors = Script("launch/export.py", ["--run", tmp_path / "run", "--output", tmp_path / "hf"]).end()
    assert code == 2 and "holds tokenizer.json alone, which rows can be written with" in errors, printed + errors
    gpt2 = json_tokenizers.gpt2(tmp_path / "gpt2", eos_token=END)
    tokenize(gpt2, "--output", tmp_path / "causal")
    places[0] = f"data.shards={tmp_path / 'causal'}"
    code, _, errors = Script("launch/pretrain.py", ["--config", smoke, *places, "model.vocab_size=400"]).end()
    assert code == 2 and "has no mask token, so nothing can be masked" in errors


def test_mistakes_are_one_clear_error(tokenize, tokenizer_dir, tmp_path):
    gpt2 = json_tokenizers.gpt2(tmp_path / "tokenizer")
    assert "has no end token of its own: give --end-token" in tokenize(gpt2, code=2)
    assert "--packing document pads rows" in tokenize(gpt2, "--end-token", END, "--packing", "document", code=2)
    assert "ends documents with <sep>" in tokenize(tokenizer_dir, "--end-token", END, code=2)
    (gpt2 / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert "has no token </s>, which tokenizer_config.json has as eos_token" in tokenize(gpt2, code=2)
    (gpt2 / "tokenizer_config.json").unlink()
    assert not (tmp_path / "out").exists()
    tokenize(gpt2, "--end-token", END)
    assert "special_ids was" in tokenize(gpt2, "--end-token", "the", code=2)
    out = tmp_path / "out"
    manifest = Manifest.load(out)
    outside = replace(manifest.special, mask=400)
    for changes, message in [
        ({"vocab_size": 70_000}, "dtype is uint16 little endian; a vocabulary of 70000 needs uint32 little endian"),
        ({"dtype": "uint32 little endian"}, "dtype is uint32 little endian; a vocabulary of 400 needs uint16"),
        ({"special_ids": outside}, "special_ids has ids 400 to 400, the vocabulary has 400"),
        ({"packing": "document"}, "packing is document, and special_ids has no pad"),
    ]:
        change_manifest(out, **changes)
        assert message in run("verify_shards.py", out, code=2)
        write_text(f"{out}/manifest.json", manifest.to_json())
    change_manifest(out, vocab_size=300)
    (out / "tokenizer/tokenizer.json").write_text("{}")
    printed = run("verify_shards.py", out, code=1)
    assert "the vocabulary has 300" in printed and "tokenizer/tokenizer.json: has sha256" in printed
    change_manifest(out, vocab_size=400, dtype="uint16 little endian")
    change_manifest(shutil.copytree(out, tmp_path / "other"), special_ids=replace(manifest.special, end=1))
    with pytest.raises(ShardError, match="write all sources of a mixture with one, and with one end token"):
        Rows([{"shards": f"{place}", "weight": 1} for place in (out, tmp_path / "other")])


def test_the_manifest_of_our_tokenizer_is_as_before(shards_to_read):
    manifest = json.loads((shards_to_read / "manifest.json").read_text())
    assert [*manifest][3:7] == ["dtype", "packing", "tokenizer_sha256", "total_rows"]
    assert Manifest.load(shards_to_read).special == OUR_SPECIAL_IDS
