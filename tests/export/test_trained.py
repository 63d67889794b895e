"""Export folders that are read: absent, wrong, damaged, in parts, or saved by transformers."""

import json
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from gmlp_scale.checkpoint.trained import ExportError, read_export
from gmlp_scale.data.tokenizer import train_tokenizer
from gmlp_scale.errors import InputError
from gmlp_scale.storage.files import upload_file


def edit_config(folder, without=(), **changes):
    """As a user does, who then deletes the checksums."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in without}))
    (folder / "SHA256SUMS").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"no export at .*: .*config\.json does not exist; launch/export"),
        ("tokenizer.model", "no tokenizer at"),
        ("model.safetensors", r"model\.safetensors does not exist"),
    ],
)
def test_absent_files_are_named(export, name, message):
    (export / name).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        read_export(export)


def test_two_labels_that_transformers_left_out(tiny_export, tmp_path):
    """save_pretrained writes no id2label where it is transformers' own default."""
    tiny_export("gmlp", tmp_path / "hf", "sequence_classification", ("LABEL_0", "LABEL_1"))
    edit_config(tmp_path / "hf", without=("id2label", "label2id"))
    assert read_export(tmp_path / "hf").labels == ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "is of model_type 'bert', not 'gmlp_scale'"),
        ({"kind": "rnn"}, "describes no model of ours: .*'rnn'"),
        ({"d_model": "wide"}, "describes no model of ours: amlp.d_model: Input should be a valid integer"),
        ({"architectures": ["BertModel"]}, r"architectures \['BertModel'\]; needed is one of GmlpScaleForM"),
        ({"vocab_size": 421}, "has 420 pieces but config.json says vocab_size 421"),
        ({"num_blocks": 3}, r"blocks\.2\..* is missing and should be .*; and \d+ more"),
        *[
            ({"details": details}, "describes no model of ours: details: Input should be")
            for details in ([], None, "x")
        ],
        ({"details": {"step": [1]}}, r"details\.step: Input should be a valid integer"),
        ({"details": {"pretrained": {"data": "x"}}}, r"details\.pretrained\.data: Input should be a valid dictionary"),
        ({"row_length": "long"}, "row_length: Input should be a valid integer"),
        ({"id2label": ["a", "b"]}, "id2label: Input should be a valid dictionary"),
        ({"architectures": {"a": [1]}}, r"architectures \{'a': \[1\]\}; needed is one of"),
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
    assert names == {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file()} - {"SHA256SUMS"}
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
    for content, found in (
        ("{", "is damaged .Expecting property name"),
        ("[]", "is of model_type 'list'"),
        ("null", "is of model_type 'NoneType'"),
        ('"text"', "is of model_type 'str'"),
        ("[" * 100_000, "is damaged .maximum recursion depth"),
        ('{"details": ' + "[" * 200 + "]" * 200 + "}", "has more than 100 levels"),
    ):
        (export / "config.json").write_text(content)
        with pytest.raises(InputError, match=rf"{export}/config\.json .*{found}"):
            read_export(export)
    trials("an export's file damaged", 6)


def test_an_export_at_a_url_is_refused_by_its_url(export):
    (export / "SHA256SUMS").unlink()
    (export / "config.json").write_text("{")
    for path in [path for path in export.rglob("*") if path.is_file()]:
        upload_file(path, f"memory://damaged/{path.relative_to(export)}")
    with pytest.raises(InputError, match=r"^memory://damaged/config\.json is damaged"):
        read_export("memory://damaged")


def test_a_card_is_written_whatever_the_details_of_the_pretrained_model_are(tiny_export, tmp_path):
    """Anyone may have written them: finetuning must not end with an error once it is done."""
    finetuned = {"task": "sst2", "step": 1, "scores": {"dev": {"accuracy": 0.5}}, "config": {}}
    for number, pretrained in enumerate(({"data": {"train_rows": "x"}}, {"data": {}, "config": {"data": []}}, {})):
        details = {"finetuned": finetuned, "pretrained": pretrained}
        tiny_export("gmlp", tmp_path / f"{number}", "sequence_classification", ("a", "b"), details=details)
        assert "sst2" in (tmp_path / f"{number}/README.md").read_text()


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
