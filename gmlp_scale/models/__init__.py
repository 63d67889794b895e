"""The encoders: one trunk (backbone.py), seven kinds of block (two in gmlp.py, transformer.py, mixer.py,
mlp_attention.py, modern_transformer.py, avey.py), heads on top.

A model is an nn.Module with
    blocks               nn.ModuleList, each (x_BND, is_token_BN or None) -> x_BND, where no position reads one that is
                         no token; engines shard, compile and recompute by block. A block with an `attention` gives its
                         attention_weights(x_BND, is_token_BN or None), for exports and pictures
    encode(token_ids_BN, padded=True) -> x_BND, the trunk. Every pass through the model begins here. Only an export
                         calls first_states and the blocks itself, because it returns the states between them
    set_recompute("none", "selective" or "full")
    init_weights(generator), forward(batch) -> loss, predict(batch) -> logits, flops_per_sample(...)
The head decides what a batch is: MaskedBatch for pretraining, LabelledBatch or SpanBatch for finetuning.

The config of a block family says what the rest of the project needs to know about the family (layers.py).
A new family is a file with its config and its block, its config in ModelConfig and a case in build_model.

Nothing here knows of processes, engines or devices. Parameters and products are in the dtype that the model was given.
Softmax, loss and the gradient of Toeplitz matrices accumulate in float32.

Shape suffixes on tensors: B batch, N positions, M masked positions, D width, F expanded width, G gate width,
V vocabulary, H heads, K head width. A digit is a size: q_B1NK has one head.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar, assert_never, get_args

import torch
from pydantic import Field
from torch.overrides import TorchFunctionMode

from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.models.avey import AveyBlock, AveyConfig
from gmlp_scale.models.backbone import Backbone
from gmlp_scale.models.gmlp import AmlpConfig, GmlpBlock, GmlpConfig, SpatialGatingUnit
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.models.mixer import MixerBlock, MixerConfig
from gmlp_scale.models.mlp_attention import MlpAttentionBlock, MlpAttentionConfig
from gmlp_scale.models.modern_transformer import ModernTransformerBlock, ModernTransformerConfig
from gmlp_scale.models.task_heads import LabelledBatch, SequenceClassifier, SpanBatch, SpanPredictor
from gmlp_scale.models.transformer import TransformerBlock, TransformerConfig

__all__ = [
    "FAMILIES",
    "AmlpConfig",
    "AveyConfig",
    "GmlpConfig",
    "LabelledBatch",
    "MaskedBatch",
    "MaskedLanguageModel",
    "MixerConfig",
    "MlpAttentionConfig",
    "ModelConfig",
    "ModernTransformerConfig",
    "SequenceClassifier",
    "SpanBatch",
    "SpanPredictor",
    "SpatialGatingUnit",
    "TransformerConfig",
    "build_model",
    "with_kernels",
]

ModelConfig = Annotated[
    GmlpConfig
    | AmlpConfig
    | TransformerConfig
    | MixerConfig
    | MlpAttentionConfig
    | ModernTransformerConfig
    | AveyConfig,
    Field(discriminator="kind"),
]
FAMILIES = {get_args(family.__annotations__["kind"])[0]: family for family in get_args(get_args(ModelConfig)[0])}
"""The config of each family, by its kind."""
AnyModel = TypeVar("AnyModel", bound=Backbone)


def kinds_with(attribute: str) -> str:
    """The kinds whose families have an attribute of FamilyConfig, as in "gmlp, amlp or mlp_attention"."""
    *kinds, last = (kind for kind, family in FAMILIES.items() if getattr(family, attribute))
    return f"{', '.join(kinds)} or {last}" if kinds else last


def with_kernels(config: ModelConfig, kernels: Literal["auto", "torch", "triton"]) -> ModelConfig:
    """The config with `kernels` set, if it has this field."""
    return config.model_copy(update={"kernels": kernels}) if hasattr(config, "kernels") else config


def build_model(
    config: ModelConfig,
    *,
    head: Callable[..., AnyModel] = MaskedLanguageModel,
    dropout: float = 0.0,
    causal: bool = False,
    seed: int | None = 0,
) -> AnyModel:
    """Builds the model on the current default device, float32, in training mode, with initial weights.

    Args:
        head: a class of heads.py or task_heads.py, with its own arguments bound by functools.partial.
        causal: no position sees a later one. For a family that can be causal.
        seed: for the initial weights, which are the same on every device. None leaves the parameters without values,
            for `init_weights` or a checkpoint to fill. Under `torch.device("meta")` they have none and take no memory.
    """
    assert not causal or config.can_be_causal
    match config:
        case GmlpConfig():  # and AmlpConfig, which extends it
            block = partial(GmlpBlock, causal=causal)
        case TransformerConfig():
            block = TransformerBlock
        case MixerConfig():
            block = MixerBlock
        case MlpAttentionConfig():
            block = partial(MlpAttentionBlock, causal=causal)
        case ModernTransformerConfig():
            block = ModernTransformerBlock
        case AveyConfig():
            block = AveyBlock
        case _:
            assert_never(config)
    places = ({"index": index} if config.blocks_differ else {} for index in range(config.num_blocks))
    with _WithoutRandomNumbers():
        model = head(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            sequence_length=config.sequence_length,
            blocks=[block(config, dropout, **place) for place in places],
            norm=config.new_norm(),
            absolute_positions=config.has_absolute_positions,
            masks_padding=config.masks_padding,
            dropout=dropout,
            multiply_adds_per_block=config.multiply_adds_per_block,
        )
    if seed is not None and not model.embedding.weight.is_meta:
        model.init_weights(torch.Generator().manual_seed(seed))
    return model


class _WithoutRandomNumbers(TorchFunctionMode):
    """Skips the initialisation in the constructors of torch's layers: it takes half of the time to build a model, and
    on the meta device it imports a compiler."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return keywords["tensor"] if "tensor" in keywords else arguments[0]
        return function(*arguments, **keywords)
