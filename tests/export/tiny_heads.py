"""Every class of an export on tiny models of every kind, as transformers sees them, and inputs for them."""

import torch

from gmlp_scale.data.batch import CLS_ID, MASK_ID, PAD_ID, SEP_ID
from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.export.hugging_face.modeling_gmlp import (
    GmlpScaleForMaskedLM,
    GmlpScaleForQuestionAnswering,
    GmlpScaleForSequenceClassification,
    GmlpScaleForTokenClassification,
    GmlpScaleModel,
    GmlpScalePreTrainedModel,
)
from tests.models.every_kind import FAMILIES, TINY, perturb, tiny_config

HEADS = [
    GmlpScaleModel,
    GmlpScaleForMaskedLM,
    GmlpScaleForSequenceClassification,
    GmlpScaleForTokenClassification,
    GmlpScaleForQuestionAnswering,
]
HEADS_AND_KINDS = [*((head, "amlp") for head in HEADS), *((GmlpScaleForTokenClassification, kind) for kind in FAMILIES)]
"""Every head and a kind of every family, without all their pairs."""
LENGTH = TINY["sequence_length"]
SHORT = 7
IDS = torch.randint(5, TINY["vocab_size"], (3, LENGTH), generator=torch.Generator().manual_seed(0))


def tiny_head_config(kind: str = "amlp", **fields) -> GmlpScaleConfig:
    """Three classes, no dropout, and special tokens as in an export."""
    special = {"pad_token_id": PAD_ID, "cls_token_id": CLS_ID, "sep_token_id": SEP_ID, "mask_token_id": MASK_ID}
    model = tiny_config(kind).model_dump(exclude={"kernels"})
    return GmlpScaleConfig(**(model | special | {"num_labels": 3, "dropout": 0.0} | fields))


def tiny_head(head: type, kind: str = "amlp", **fields) -> GmlpScalePreTrainedModel:
    """In evaluation mode; no parameter is at its start."""
    torch.manual_seed(0)
    return perturb(head(tiny_head_config(kind, **fields)).eval())


def labels_for(head: type, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the head needs beside the ids to return a loss."""
    match head.__name__.removeprefix("GmlpScale"):
        case "ForMaskedLM":
            return {"labels": ids}
        case "ForSequenceClassification":
            return {"labels": ids[:, 0] % 3}
        case "ForTokenClassification":
            return {"labels": ids % 3}
        case "ForQuestionAnswering":
            return {"start_positions": ids[:, 0] % 5, "end_positions": ids[:, 1] % 5}
    return {}
