"""Other people's models at the recipe's shape, or with its FLOPs, as training steps.

A training step is forward, backward and update by torch's fused AdamW, with float32 parameters and, where the recipe
says bf16, autocast, as their users train.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.data.batch import MaskedBatch, num_masked_positions
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import RunConfig

WIDTH_PER_HEAD = 64
LARGEST_FLOPS_DIFFERENCE = 0.1


Step = tuple[Callable[[], None], dict[str, int | bool]]
"""A call that trains one step, and the model's description for the report."""


def g_mlp_pytorch_step(run: RunConfig, device: torch.device, batch: MaskedBatch) -> Step:
    """The g-mlp-pytorch package's gMLP of the recipe's blocks and widths, eager, as in its README: dense W, logits at
    all positions."""
    from g_mlp_pytorch import gMLP

    model = gMLP(
        num_tokens=run.model.vocab_size,
        dim=run.model.d_model,
        depth=run.model.num_blocks,
        seq_len=run.model.sequence_length,
        ff_mult=run.model.d_ffn // run.model.d_model,
    )
    labels_BN = torch.full_like(batch.token_ids_BN, -100)
    labels_BN = labels_BN.scatter(1, batch.masked_positions_BM, batch.labels_BM)

    def loss() -> Tensor:
        logits_BNV = model(batch.token_ids_BN)
        return F.cross_entropy(logits_BNV.flatten(0, 1).float(), labels_BN.flatten())

    return _step(model, run, device, loss)


def bert_step(run: RunConfig, device: torch.device, batch: MaskedBatch) -> Step:
    """transformers' BERT at its best: sdpa attention, torch.compile, its head on the masked positions only."""
    from transformers import BertConfig, BertForMaskedLM

    sizes, flops = transformer_sizes(run, mlp_weights_per_width=8)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * sizes["hidden_size"], **options))
    return _transformer_step(model, (model.bert, model.cls), run, device, batch, flops)


def modernbert_step(run: RunConfig, device: torch.device, batch: MaskedBatch) -> Step:
    """transformers' ModernBERT at its best, as BERT above. Under sdpa its windows are masks: it computes the whole
    attention, and its FLOPs count the whole attention."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    sizes, flops = transformer_sizes(run, mlp_weights_per_width=4.5)
    tokens = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": None, "eos_token_id": None}
    model = ModernBertForMaskedLM(ModernBertConfig(**sizes, intermediate_size=3 * sizes["hidden_size"] // 2, **tokens))
    return _transformer_step(model, (model.model, nn.Sequential(model.head, model.decoder)), run, device, batch, flops)


def transformer_sizes(run: RunConfig, *, mlp_weights_per_width: float) -> tuple[dict[str, int | str], int]:
    """(sizes as transformers names them, training FLOPs of a row) of a model that has the recipe's FLOPs within 10 %.

    It takes the nearest possible width to 1.5 d_model (at most 1024, as in the paper's BERTs).

    mlp_weights_per_width: the number of weights in one layer's MLP, divided by the width squared.
    """
    n, vocab_size, wanted = run.model.sequence_length, run.model.vocab_size, run.flops_per_row().last
    num_masked = num_masked_positions(n, run.data.masked_fractions.last)
    preferred = min(1.5 * run.model.d_model, 1024)
    for width in sorted(range(WIDTH_PER_HEAD, 2049, WIDTH_PER_HEAD), key=lambda width: abs(width - preferred)):
        layer = 6 * n * ((4 + mlp_weights_per_width) * width * width + 2 * n * width)
        head = 6 * num_masked * (width * width + width * vocab_size)
        num_layers = max(1, round((wanted - head) / layer))
        flops = num_layers * layer + head
        if abs(flops / wanted - 1) <= LARGEST_FLOPS_DIFFERENCE:
            sizes = {
                "hidden_size": width,
                "num_hidden_layers": num_layers,
                "num_attention_heads": width // WIDTH_PER_HEAD,
            }
            sizes |= {"vocab_size": vocab_size, "max_position_embeddings": n, "attn_implementation": "sdpa"}
            return sizes, int(flops)
    raise InputError(f"{run.name}: no Transformer has {wanted:.3g} FLOPs a row; choose a larger model")


def _transformer_step(
    model: nn.Module,
    parts: tuple[nn.Module, nn.Module],
    run: RunConfig,
    device: torch.device,
    batch: MaskedBatch,
    flops: int,
) -> Step:
    """parts: the trunk and the head. flops: of training a row."""
    trunk, head = parts
    trunk.compile()

    def loss() -> Tensor:
        x_BND = trunk(input_ids=batch.token_ids_BN).last_hidden_state
        x_BMD = x_BND.take_along_dim(batch.masked_positions_BM.unsqueeze(-1), dim=1)
        return F.cross_entropy(head(x_BMD).flatten(0, 1).float(), batch.labels_BM.flatten())

    size = {"width": model.config.hidden_size, "num_layers": model.config.num_hidden_layers, "compile": True}
    return _step(model, run, device, loss, flops=flops * run.train.micro_batch_size, **size)


def _step(model: nn.Module, run: RunConfig, device: torch.device, loss: Callable[[], Tensor], **known) -> Step:
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    is_bf16 = run.train.precision == "bf16"

    def train() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train, {"parameters": sum(p.numel() for p in model.parameters()), **known}
