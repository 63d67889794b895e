"""Exports made before `masks_padding`: they read padding, so they fill rows up to the length of training."""

import json

import pytest
import torch
import torch.nn.functional as F

from gmlp_scale.analysis.predictions import fill
from gmlp_scale.checkpoint.trained import read_export
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.export.hugging_face.modeling_gmlp import (
    GmlpScaleForMaskedLM,
    GmlpScaleForQuestionAnswering,
    GmlpScaleModel,
)
from tests.export.tiny_heads import IDS, LENGTH, SHORT, tiny_head
from tests.models.every_kind import READS_PADDING

ROW_LENGTH = 10
MASK = (torch.arange(SHORT) < torch.tensor([[SHORT], [5], [3]])).long()


def older_head(head: type, kind: str, **fields):
    return tiny_head(head, kind, masks_padding=False, **fields)


@pytest.mark.parametrize("row_length", [None, ROW_LENGTH])
@pytest.mark.parametrize("kind", READS_PADDING)
@torch.no_grad()
def test_rows_are_filled_up_to_the_length_of_training(kind, row_length):
    model = older_head(GmlpScaleModel, kind, row_length=row_length)
    filled = F.pad(IDS[:, :SHORT] * MASK, (0, (row_length or LENGTH) - SHORT))
    expected_BND = model.model.norm(model.model.encode(filled, padded=False))[:, :SHORT]
    for given in ({"input_ids": IDS[:, :SHORT], "attention_mask": MASK}, {"input_ids": IDS[:, :SHORT] * MASK}):
        torch.testing.assert_close(model(**given).last_hidden_state, expected_BND, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_part_of_an_attention_falls_on_what_was_added():
    for weights_BHNN in older_head(GmlpScaleModel, "amlp")(IDS[:, :SHORT], output_attentions=True).attentions:
        assert weights_BHNN.shape == (3, 1, SHORT, SHORT) and (weights_BHNN.sum(-1) < 1).all()


def test_rows_longer_than_in_training_are_refused():
    with pytest.raises(ValueError, match=r"rows hold 12 tokens but in training they held 10: .* max_length=10"):
        older_head(GmlpScaleForQuestionAnswering, "gmlp", row_length=ROW_LENGTH)(IDS)


@pytest.mark.parametrize("kind", READS_PADDING)
@torch.no_grad()
def test_an_export_without_the_field_computes_as_it_did(tiny_export, tmp_path, kind):
    tiny_export(kind, tmp_path, masks_padding=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("masks_padding") is False
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "SHA256SUMS").unlink()
    trained, exported = read_export(tmp_path), GmlpScaleForMaskedLM.from_pretrained(tmp_path)
    assert trained.config.masks_padding is exported.model.masks_padding is False
    ids = torch.tensor([[2, *trained.tokenizer().encode("the"), 4, *trained.tokenizer().encode(" dog"), 3]])
    filled = F.pad(ids, (0, LENGTH - ids.shape[1]))
    masked = (ids == 4).nonzero()[:, 1:].T
    logits_1MV = trained.build().predict(MaskedBatch(filled, masked, masked, padded=False))
    torch.testing.assert_close(exported(ids).logits[:, masked[0]], logits_1MV, rtol=0, atol=1e-5)
    found_MV = fill(trained.build(), trained.tokenizer(), "the <mask> dog")
    torch.testing.assert_close(found_MV, logits_1MV[0].softmax(-1), rtol=0, atol=1e-6)
