"""Times texts of several lengths in an export, beside transformers' BERT of as many parameters."""

from functools import partial

import torch
from transformers import BertConfig, BertModel, PreTrainedModel

from benchmarks.timing import time_in_turns, turns_of
from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, PAD_ID
from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.export.hugging_face.modeling_gmlp import GmlpScaleModel
from gmlp_scale.recipe.config import RunConfig

NUM_ROWS = 2


def measure_lengths(run: RunConfig, device: torch.device, num_rounds: int) -> dict:
    """Seconds to the hidden states of 2 texts of 16, 32 ... tokens up to the recipe's length: eager, in float32, with
    random weights. `reads_padding` is the same model as it was before model.masks_padding, which fills up every row."""
    models = {name: _export(run, masks) for name, masks in (("export", True), ("reads_padding", False))}
    models["bert"] = _bert(run, models["export"])
    seconds, costs = {}, {}
    for length in (2**power for power in range(4, run.model.sequence_length.bit_length())):
        ids_BN = torch.randint(NUM_SPECIAL_TOKENS, run.model.vocab_size, (NUM_ROWS, length), device=device)
        calls = {name: partial(_encode, model.to(device).eval(), ids_BN) for name, model in models.items()}
        seconds[f"{length} tokens"] = times = time_in_turns(turns_of(calls, device), num_rounds)
        for peer in ("bert", "reads_padding"):
            costs[f"{length} tokens over {peer}"] = times["export"] / times[peer]
    parameters = {name: model.num_parameters() for name, model in models.items()}
    return {"rows": NUM_ROWS, "parameters": parameters, "seconds": seconds, "costs": costs}


@torch.inference_mode()
def _encode(model: PreTrainedModel, ids_BN: torch.Tensor) -> torch.Tensor:
    return model(ids_BN, attention_mask=torch.ones_like(ids_BN)).last_hidden_state


def _export(run: RunConfig, masks_padding: bool) -> GmlpScaleModel:
    fields = run.model.model_dump(exclude={"kernels"}) | {"masks_padding": masks_padding}
    return GmlpScaleModel(GmlpScaleConfig(**fields, pad_token_id=PAD_ID, cls_token_id=CLS_ID))


def _bert(run: RunConfig, export: GmlpScaleModel) -> BertModel:
    """Of the recipe's width, with layers of about BERT's shape that together have the parameters of the blocks."""
    d, num_weights = run.model.d_model, sum(weight.numel() for weight in export.model.blocks.parameters())
    num_layers = max(1, round(num_weights / (12 * d * d)))
    sizes = {
        "hidden_size": d,
        "num_hidden_layers": num_layers,
        "num_attention_heads": max(1, d // 64),
        "intermediate_size": max(1, round((num_weights / num_layers - 4 * d * d) / (2 * d))),
        "vocab_size": run.model.vocab_size,
        "max_position_embeddings": run.model.sequence_length,
    }
    return BertModel(BertConfig(**sizes), add_pooling_layer=False)
