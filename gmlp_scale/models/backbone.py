"""The trunk that every encoder shares: token embedding, blocks, final LayerNorm.

Shape suffixes: B batch, N positions, D width.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02
"""Of every Linear and embedding (BERT's; the paper does not give its own)."""


class Backbone(nn.Module):
    """Token ids to hidden states. It knows nothing of what a block does but x_BND -> x_BND.

    Position embeddings are for the Transformer with absolute positions; the others learn order within their blocks.
    Dropout stands where BERT has it: after the embedding, on the output of every residual branch and on attention
    probabilities (the blocks' own); it holds no parameters.
    """

    recompute: Literal["none", "full"] = "none"
    """With "full", keeps only each block's input for the backward pass and runs the block again there."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        sequence_length: int,
        blocks: Iterable[nn.Module],
        multiply_adds_per_block: int,
        absolute_positions: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.sequence_length = sequence_length
        self.multiply_adds_per_block = multiply_adds_per_block
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(sequence_length, d_model) if absolute_positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def encode(self, token_ids_BN: Tensor) -> Tensor:
        """x_BND after the last block and before the final LayerNorm.

        ValueError if the rows are longer than the model was made for.
        """
        num_positions = token_ids_BN.shape[1]
        if num_positions > self.sequence_length:
            raise ValueError(
                f"the rows hold {num_positions} tokens but the model was made for at most {self.sequence_length}: "
                f"cut the rows, or train a model with model.sequence_length={num_positions}"
            )
        x_BND = self.embedding(token_ids_BN)
        if self.positions is not None:
            x_BND = x_BND + self.positions(torch.arange(num_positions, device=x_BND.device))
        x_BND = self.dropout(x_BND)
        for block in self.blocks:
            if self.recompute == "full" and torch.is_grad_enabled():
                # Only dropout draws random numbers; without it their state need not be kept.
                x_BND = checkpoint(block, x_BND, use_reentrant=False, preserve_rng_state=self.dropout.p > 0)
            else:
                x_BND = block(x_BND)
        return x_BND

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fills every parameter in place from a CPU generator: the same numbers on any device.

        | Linear and embedding weights | N(0, 0.02) |
        | Linear biases                | 0          |
        | LayerNorm gain, bias         | 1, 0       |

        Then each layer with an `init_special_weights` of its own has the last word, so that nothing here can
        overwrite it.
        """
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    noise = torch.randn(module.weight.shape, generator=generator, device="cpu")
                    module.weight.copy_(noise * INIT_STD)
                    if isinstance(module, nn.Linear):
                        module.bias.zero_()
                case nn.LayerNorm():
                    module.weight.fill_(1.0)
                    module.bias.zero_()
        for module in self.modules():
            if hasattr(module, "init_special_weights"):
                module.init_special_weights(generator)
