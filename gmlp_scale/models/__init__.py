"""The encoders: one trunk (backbone), four kinds of block (gmlp holds two, transformer, mixer), heads on top.

A model is an nn.Module with
    blocks               nn.ModuleList, each x_BND -> x_BND; engines shard, compile and recompute by block
    recompute            "none" or "full"
    init_weights(generator), forward(batch) -> loss, predict(batch) -> logits_BMV, flops_per_sample(num_masked)

Nothing here knows of processes, engines or devices. Parameters and products are in the dtype that the model was given;
softmax, loss and the gradient of Toeplitz matrices accumulate in float32.

Shape suffixes on tensors: B batch, N positions, M masked positions, D width, F expanded width, G gate width,
V vocabulary, H heads, K head width. A figure stands for itself: q_B1NK has one head.
"""

from typing import Annotated

from pydantic import Field

from gmlp_scale.models.gmlp import AmlpConfig, GmlpBlock, GmlpConfig
from gmlp_scale.models.heads import MaskedLanguageModel
from gmlp_scale.models.mixer import MixerBlock, MixerConfig
from gmlp_scale.models.transformer import TransformerBlock, TransformerConfig

ModelConfig = Annotated[GmlpConfig | AmlpConfig | TransformerConfig | MixerConfig, Field(discriminator="kind")]


def build_model(config: ModelConfig) -> MaskedLanguageModel:
    """The model on the current default device (under `torch.device("meta")` without memory), not yet initialised."""
    absolute_positions = False
    match config:
        case GmlpConfig():  # and AmlpConfig, which extends it
            block = GmlpBlock
        case TransformerConfig():
            block = TransformerBlock
            absolute_positions = config.positions == "absolute"
        case MixerConfig():
            block = MixerBlock
    return MaskedLanguageModel(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        sequence_length=config.sequence_length,
        blocks=[block(config) for _ in range(config.num_blocks)],
        absolute_positions=absolute_positions,
        multiply_adds_per_block=config.multiply_adds_per_block,
    )
