"""Export folders: written whole or not at all, read back to the bit, and refused with a reason."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.export import folder as folder_module
from gmlp_scale.trained import ExportError, read_export
from tests.models.every_kind import KINDS, TINY

HEADS = [("masked_language_model", ()), ("sequence_classification", ("no", "maybe", "yes")), ("question_answering", ())]


@pytest.fixture
def export(tiny_export, tmp_path):
    tiny_export("amlp", tmp_path / "hf")
    return tmp_path / "hf"


def edit_config(folder, **changes):
    """As a user does, who then deletes the checksums."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (folder / "SHA256SUMS").unlink(missing_ok=True)


def assert_weights_are(export, model):
    expected = dict(model.named_parameters())
    assert export.weights.keys() == expected.keys()
    for name, weight in export.weights.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back(tiny_export, tokenizer_folder, tmp_path, kind):
    model = tiny_export(kind, tmp_path / "hf")
    export = read_export(tmp_path / "hf")
    assert export.config.model_dump() | TINY | KINDS[kind] | {"vocab_size": 420} == export.config.model_dump()
    assert_weights_are(export, model)
    assert export.tokenizer_sha256 == Tokenizer(tokenizer_folder).sha256
    assert (export.head, export.labels, export.row_length) == ("masked_language_model", (), None)
    assert export.details == {"step": 3, "heldout": {"step": 2, "perplexity": 17.25}, "config": {"name": kind}}


@pytest.mark.parametrize(("head", "labels"), HEADS)
def test_every_head_comes_back(tiny_export, tmp_path, head, labels):
    model = tiny_export("gmlp", tmp_path / "hf", head, labels, row_length=8)
    export = read_export(tmp_path / "hf")
    assert_weights_are(export, model)
    assert (export.head, export.labels, export.row_length) == (head, labels, 8)


def test_every_file_has_the_mode_of_the_umask(tiny_export, tmp_path):
    before = os.umask(0o027)
    try:
        tiny_export("gmlp", tmp_path / "hf")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o640}


def test_the_file_holds_the_tied_matrix_once(export):
    names = load_file(export / "model.safetensors").keys()
    assert "model.embedding.weight" in names
    assert not any("head" in name for name in names)


def test_the_card_tells_the_recipe_the_steps_and_the_perplexity(export, tiny_export, tmp_path):
    card = (export / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nlicense: unknown\npipeline_tag: fill-mask\n")
    for text in (
        "aMLP, 2 blocks",
        "3 steps",
        "not measured at this step; 17.250 at step 2",
        "name: amlp",
        'pipeline("fill-mask"',
        "it pads every row to 12 tokens itself",
        "takes the time and memory of 12 tokens",
    ):
        assert text in card
    assert "model-index" not in card  # the figure is of other weights
    tiny_export("bert-relative", tmp_path / "bert")
    assert "No position attends to padding" in (tmp_path / "bert" / "README.md").read_text()


def test_the_card_of_finetuned_weights_tells_their_scores(tiny_export, tmp_path):
    scores = {"dev": {"accuracy": 0.75, "loss": 0.5}, "dev_mismatched": {"accuracy": 0.5, "loss": 0.25}}
    details = {"finetuned": {"task": "mnli", "step": 12, "scores": scores, "config": {}}, "pretrained": None}
    folder = tmp_path / "classifier"
    tiny_export("gmlp", folder, "sequence_classification", ("a", "b"), details=details, row_length=8)
    card = ModelCard.load(folder / "README.md")
    found = [(of.dataset_name, of.dataset_split, of.metric_type, of.metric_value) for of in card.data.eval_results]
    assert found == [("mnli", "dev", "accuracy", 0.75), ("mnli", "dev_mismatched", "accuracy", 0.5)]
    for text in (
        "Finetuned on mnli for 12 steps",
        "| dev_mismatched loss | 0.2500 |",
        'pipeline("text-classification"',
        "pads every row to 8 tokens",
    ):
        assert text in card.text


def test_details_keep_no_place_of_this_machine(tiny_export, tmp_path):
    config = {
        "output_dir": "/home/ann/runs",
        "data": {"shards": "/home/ann/c4_512/", "cache_dir": "/scratch", "parts": [{"shards": "file:///home/ann/web"}]},
        "engine": {"deepspeed_config": "ds.json"},
        "init_from": "../ann/hf",
        "model": "s3://bucket/hf",
        "name": "gmlp",
    }
    tiny_export("gmlp", tmp_path / "hf", details={"config": config})
    assert read_export(tmp_path / "hf").details["config"] == {
        "data": {"shards": "c4_512", "parts": [{"shards": "web"}]},
        "engine": {},
        "init_from": "hf",
        "model": "s3://bucket/hf",
        "name": "gmlp",
    }
    files = [path.read_bytes() for path in (tmp_path / "hf").iterdir()]
    assert not any(
        place in content for content in files for place in (b"/home/ann", b"../ann", b"/scratch", bytes(tmp_path))
    )


def test_a_taken_folder_is_refused_and_left_alone(tiny_export, tmp_path):
    (tmp_path / "empty").mkdir()
    tiny_export("gmlp", tmp_path / "empty")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="taken is there already: remove it"):
        tiny_export("gmlp", tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.txt"]
    with pytest.raises(ExportError, match=r"thesis\.txt is there already"):
        tiny_export("gmlp", tmp_path / "taken" / "thesis.txt")


def test_nothing_is_left_where_writing_fails(tiny_export, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(folder_module, "write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_export("gmlp", tmp_path / "exports" / "hf")
    assert list((tmp_path / "exports").iterdir()) == []


def test_no_tokenizer(tiny_export, tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        tiny_export("gmlp", tmp_path / "hf", tokenizer_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_absent_files_are_named(export, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no export at .*nowhere: .*config\.json does not exist; launch/export"
    ):
        read_export(tmp_path / "nowhere")
    (export / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        read_export(export)
    (tmp_path / "tokenizer.model").rename(export / "tokenizer.model")
    (export / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        read_export(export)


def test_two_labels_that_transformers_left_out(tiny_export, tmp_path):
    """save_pretrained writes no id2label where it is transformers' own default."""
    tiny_export("gmlp", tmp_path / "hf", "sequence_classification", ("LABEL_0", "LABEL_1"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    del config["id2label"], config["label2id"]
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf" / "SHA256SUMS").unlink()
    assert read_export(tmp_path / "hf").labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "is of model_type 'bert', not 'gmlp_scale'"),
        ({"kind": "rnn"}, "describes no model of ours: .*'rnn'"),
        ({"d_model": "wide"}, "describes no model of ours: amlp.d_model: Input should be a valid integer"),
        ({"architectures": ["GmlpScaleModel"]}, r"architectures \['GmlpScaleModel'\]; needed is one of GmlpScaleForM"),
        ({"vocab_size": 421}, "has 420 pieces but config.json says vocab_size 421"),
        ({"num_blocks": 3}, r"blocks\.2\..* is missing and should be .*; and \d+ more"),
        ({"d_attn": 9}, r"attention\.out\.weight is \(16, 8\) and should be \(16, 9\)"),
    ],
)
def test_a_wrong_config_is_refused(export, changes, message):
    edit_config(export, **changes)
    with pytest.raises(ExportError, match=message):
        read_export(export)


def test_one_flipped_bit_is_found_and_an_export_without_checksums_is_read_with_a_warning(export, caplog, trials):
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=export, check=True, capture_output=True)
    names = {line.split("  ")[1] for line in (export / "SHA256SUMS").read_text().splitlines()}
    assert names == {path.name for path in export.iterdir()} - {"SHA256SUMS"}
    read_export(export)
    assert not caplog.records
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        whole = (export / name).read_bytes()
        flipped = bytearray(whole)
        flipped[-len(whole) // 3] ^= 1
        (export / name).write_bytes(flipped)
        with pytest.raises(ExportError, match=f"{name} does not have its checksum of SHA256SUMS: copy or export it"):
            read_export(export)
        (export / name).write_bytes(whole)
    (export / "SHA256SUMS").unlink()
    read_export(export)
    assert "hf has no SHA256SUMS, so damage to it goes unnoticed" in caplog.text
    trials("an export's file damaged", 3)


def test_damaged_files_are_refused(export, trials):
    (export / "SHA256SUMS").unlink()
    (export / "config.json").write_text("{")
    with pytest.raises(ExportError, match="is not JSON"):
        read_export(export)
    (export / "config.json").write_text("[]")
    with pytest.raises(ExportError, match="is of model_type 'list'"):
        read_export(export)
    trials("an export's file damaged", 2)


def test_damaged_weights_are_refused(export):
    (export / "SHA256SUMS").unlink()
    path = export / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.more": torch.zeros(2)}, path)
    with pytest.raises(ExportError, match=r"more is \(2,\) and should be absent"):
        read_export(export)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        read_export(export)


def test_weights_in_parts(export):
    expected, whole = read_export(export).weights, export / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    part_of_name = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for part in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: tensors[name] for name in names if part_of_name[name] == part}, export / part)
    whole.unlink()
    (export / "SHA256SUMS").unlink()
    index = export / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": part_of_name}))
    found = read_export(export).weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    (export / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights at .*model-1\.safetensors does not exist"):
        read_export(export)
    for content, message in (
        ("{", "is not an index of weights"),
        ('{"weights": {}}', "is not an index of weights"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"names files of another folder: \.\./a\.safetensors"),
        ('{"weight_map": {}}', "the weights are not of config.json's model"),
    ):
        index.write_text(content)
        with pytest.raises(ExportError, match=message):
            read_export(export)


def test_the_tokenizer_must_be_the_model_s(export, tmp_path):
    train_tokenizer(["the cat and the dog went over the sea"] * 50, 275, tmp_path)
    shutil.copy(tmp_path / "tokenizer.model", export)
    (export / "SHA256SUMS").unlink()
    with pytest.raises(ExportError, match="they are not of one export"):
        read_export(export)
