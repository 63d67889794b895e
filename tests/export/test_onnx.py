"""Exports as programs of torch.export and as ONNX files, for any batch and any length; and docs/exports.md."""

import re
from pathlib import Path

import pytest
import torch

from gmlp_scale.export.hugging_face.modeling_gmlp import (
    GmlpScaleForQuestionAnswering,
    GmlpScaleForSequenceClassification,
    GmlpScaleForTokenClassification,
)
from tests.export.conftest import SENTENCE
from tests.export.tiny_heads import IDS, LENGTH, tiny_head

ANY = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=LENGTH)}
GIVEN = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
DYNAMIC = dict.fromkeys(GIVEN, ANY)
PAGE = Path(__file__).parents[2] / "docs" / "exports.md"
SHAPES = [(3, LENGTH), (1, LENGTH), (2, 5), (4, 1)]


def assert_runs_as_the_model(run, model):
    """run(input_ids, attention_mask) -> the outputs; with padding behind the second position of each other row."""
    for num_rows, num_positions in SHAPES:
        ids = IDS[:1, :num_positions].repeat(num_rows, 1).roll(1, dims=-1)
        mask = torch.ones_like(ids)
        mask[1::2, 2:] = 0
        with torch.no_grad():
            expected = model(ids, mask).to_tuple()
        for found, tensor in zip(run(ids, mask), expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(found), tensor, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (GmlpScaleForTokenClassification, "bert-relative"),
        (GmlpScaleForQuestionAnswering, "mixer"),
        (GmlpScaleForQuestionAnswering, "mlp-attention"),
        (GmlpScaleForTokenClassification, "avey-static"),
        (GmlpScaleForTokenClassification, "avey-dynamic"),
        (GmlpScaleForTokenClassification, "gmlp-dynamic"),
    ],
)
def test_a_program_of_torch_export(head, kind):
    model = tiny_head(head, kind, num_blocks=1)
    program = torch.export.export(model, kwargs=GIVEN, args=(), dynamic_shapes=DYNAMIC).module()
    assert_runs_as_the_model(lambda ids, mask: program(input_ids=ids, attention_mask=mask).to_tuple(), model)


def assert_file_runs_as_the_model(place, model):
    session = pytest.importorskip("onnxruntime").InferenceSession(place, providers=["CPUExecutionProvider"])
    assert [given.shape for given in session.get_inputs()] == [["batch", "length"]] * 2
    assert [output.name for output in session.get_outputs()] == ["logits"]
    assert_runs_as_the_model(
        lambda ids, mask: session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}), model
    )


@pytest.mark.filterwarnings("ignore")
def test_an_onnx_file(tmp_path):
    pytest.importorskip("onnxscript")
    model = tiny_head(GmlpScaleForSequenceClassification, "bert-relative", num_blocks=1)
    place = tmp_path / "model.onnx"
    torch.onnx.export(model, f=place, kwargs=GIVEN, dynamic_shapes=DYNAMIC, output_names=["logits"])
    assert_file_runs_as_the_model(place, model)


@pytest.mark.filterwarnings("ignore")
def test_the_documented_onnx_file(tiny_export, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    tiny_export("amlp", tmp_path / "amlp")
    monkeypatch.chdir(tmp_path)
    recipe, quantized = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = {}
    exec(recipe.replace("exports/gmlp_base", "./amlp"), names)
    assert_file_runs_as_the_model("model.onnx", names["model"])
    Path("lines.txt").write_text(f"{SENTENCE}\nthe cat went over to see a dog\n" * 8)
    exec(quantized, names)
    whole, of_int8, agreement = capsys.readouterr().out.splitlines()[-3:]
    sizes = [float(line.split()[1]) for line in (whole, of_int8)]
    assert whole.startswith("model.onnx: ") and of_int8.startswith("model_int8.onnx: ") and sizes[1] < sizes[0]
    (share,) = re.fullmatch(r"the same token in (.*)% of \d+ masks", agreement).groups()
    assert float(share) > 50
    file = pytest.importorskip("onnx").load("model_int8.onnx")
    kinds = [node.op_type for node in file.graph.node]
    assert kinds.count("MatMulInteger") == 2 * 4 + 1  # the matrices over channels of two blocks, and the embedding


def test_every_row_of_what_holds_in_the_page_has_its_test():
    table = PAGE.read_text().partition("| what holds |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert len(rows) > 20
    for row in rows:
        (file, test), *others = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert not others and f"def {test}(" in Path(__file__).with_name(file).read_text(), row
