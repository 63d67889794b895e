"""Times texts of several lengths in an export, beside transformers' BERT and ModernBERT of as many parameters."""

from functools import partial

import torch
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, PreTrainedModel

from benchmarks.timing import time_in_turns, turns_of
from gmlp_scale.data.batch import CLS_ID, NUM_SPECIAL_TOKENS, PAD_ID, SEP_ID
from gmlp_scale.export.hugging_face.configuration_gmlp import GmlpScaleConfig
from gmlp_scale.export.hugging_face.modeling_gmlp import GmlpScaleModel
from gmlp_scale.recipe.config import RunConfig

NUM_ROWS = 2
PEERS = ("bert", "modernbert")


def measure_lengths(run: RunConfig, device: torch.device, num_rounds: int) -> dict:
    """Seconds to the hidden states of 2 texts of 16, 32 ... tokens up to the recipe's length: in float32, with random
    weights, eager and by one program of torch.compile for all lengths. `reads_padding` is the same model as it was
    before model.masks_padding, which fills up every row."""
    export = _export(run, masks_padding=True)
    models = {"export": export, "bert": _bert(run, export), "modernbert": _modernbert(run, export)}
    parameters = {name: model.num_parameters() for name, model in models.items()}
    models |= {f"{name} compiled": torch.compile(model, dynamic=True) for name, model in models.items()}
    models["reads_padding"] = _export(run, masks_padding=False)
    seconds, costs = {}, {}
    for length in (2**power for power in range(4, run.model.sequence_length.bit_length())):
        ids_BN = torch.randint(NUM_SPECIAL_TOKENS, run.model.vocab_size, (NUM_ROWS, length), device=device)
        calls = {name: partial(_encode, model.to(device).eval(), ids_BN) for name, model in models.items()}
        seconds[f"{length} tokens"] = times = time_in_turns(turns_of(calls, device), num_rounds)
        for peer in (*PEERS, "reads_padding"):
            costs[f"{length} tokens over {peer}"] = times["export"] / times[peer]
        for peer in PEERS:
            costs[f"{length} tokens over {peer} compiled"] = times["export compiled"] / times[f"{peer} compiled"]
    return {"rows": NUM_ROWS, "parameters": parameters, "seconds": seconds, "costs": costs}


@torch.inference_mode()
def _encode(model: PreTrainedModel, ids_BN: torch.Tensor) -> torch.Tensor:
    return model(ids_BN, attention_mask=torch.ones_like(ids_BN)).last_hidden_state


def _export(run: RunConfig, masks_padding: bool) -> GmlpScaleModel:
    fields = run.model.model_dump(exclude={"kernels"}) | {"masks_padding": masks_padding}
    return GmlpScaleModel(GmlpScaleConfig(**fields, pad_token_id=PAD_ID, cls_token_id=CLS_ID))


def _bert(run: RunConfig, export: GmlpScaleModel) -> BertModel:
    sizes = _sizes(run, export, matrices_per_mlp=2)
    return BertModel(BertConfig(**sizes), add_pooling_layer=False)


def _modernbert(run: RunConfig, export: GmlpScaleModel) -> ModernBertModel:
    """Its windows of 128 tokens, in two layers of three, are those of its own config."""
    tokens = {"cls_token_id": CLS_ID, "sep_token_id": SEP_ID, "bos_token_id": None, "eos_token_id": None}
    sizes = _sizes(run, export, matrices_per_mlp=3)  # its MLP is gated
    return ModernBertModel(ModernBertConfig(**sizes, pad_token_id=PAD_ID, **tokens))


def _sizes(run: RunConfig, export: GmlpScaleModel, *, matrices_per_mlp: int) -> dict[str, int]:
    """Of the recipe's width, with layers of about BERT's shape that together have the parameters of the blocks."""
    d, num_weights = run.model.d_model, sum(weight.numel() for weight in export.model.blocks.parameters())
    num_layers = max(1, round(num_weights / (12 * d * d)))
    return {
        "hidden_size": d,
        "num_hidden_layers": num_layers,
        "num_attention_heads": max(1, d // 64),
        "intermediate_size": max(1, round((num_weights / num_layers - 4 * d * d) / (matrices_per_mlp * d))),
        "vocab_size": run.model.vocab_size,
        "max_position_embeddings": run.model.sequence_length,
    }
