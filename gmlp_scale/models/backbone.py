"""The trunk that every encoder shares: token embedding, blocks, final norm.

Shape suffixes: B batch, N positions, D width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gmlp_scale.data.batch import PAD_ID
from gmlp_scale.errors import InputError
from gmlp_scale.models.layers import BlockGroup, Recompute, recomputing

INIT_STD = 0.02
"""The initial standard deviation of every Linear and embedding weight: BERT's, as the paper gives none."""


class Backbone(nn.Module):
    """Token ids to hidden states. All it knows of a block is (x_BND, is_token_BN) -> x_BND.

    is_token_BN is bool, False at <pad>, which no position then reads; or None if there is none, or if the model was
    made to read it: "nor is it necessary to mask out the paddings" (Figure 1).
    Position embeddings are for the Transformer with absolute positions; the others learn order within their blocks.
    Dropout is where BERT has it: after the embedding and on the output of every residual branch. Attention
    probabilities have it too, within the blocks.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        sequence_length: int,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        multiply_adds_per_block: float,
        absolute_positions: bool = False,
        masks_padding: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.sequence_length = sequence_length
        self.multiply_adds_per_block = multiply_adds_per_block
        self.masks_padding = masks_padding
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(sequence_length, d_model) if absolute_positions else None
        self.blocks = nn.ModuleList(blocks)
        self.groups: nn.ModuleList | None = None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def encode(self, token_ids_BN: Tensor, *, padded: bool = True) -> Tensor:
        """x_BND after the last block and before the final LayerNorm.

        padded: whether the rows may hold <pad>. Packed rows hold none, and attention is faster without a mask. Raises
        as first_states.
        """
        x_BND = self.first_states(self.embedding(token_ids_BN))
        is_token_BN = self.tokens(token_ids_BN != PAD_ID) if padded else None
        for module in self.groups or self.blocks:
            x_BND = module(x_BND, is_token_BN)
        return x_BND

    def tokens(self, is_token_BN: Tensor) -> Tensor | None:
        """is_token_BN for the blocks. A row of padding alone counts as tokens: a softmax over nothing would be NaN."""
        return is_token_BN | ~is_token_BN.any(1, keepdim=True) if self.masks_padding else None

    def first_states(self, embedded_BND: Tensor) -> Tensor:
        """What the first block reads: the tokens' embeddings, with position embeddings where the model has them.

        Raises:
            InputError: the rows are longer than the model's sequence_length.
        """
        num_positions = embedded_BND.shape[1]
        if num_positions > self.sequence_length:
            raise InputError(
                f"the rows hold {num_positions} tokens but the model was made for at most {self.sequence_length}: "
                f"cut the rows, or train a model with model.sequence_length={num_positions}"
            )
        if self.positions is not None:
            embedded_BND = embedded_BND + self.positions(torch.arange(num_positions, device=embedded_BND.device))
        return self.dropout(embedded_BND)

    def set_recompute(self, recompute: Recompute) -> None:
        """Sets what each block computes again in the backward pass. Call it once, before the blocks are compiled.

        The recomputation is inside the block, where torch.compile sees it. If it were outside, the rule of "selective"
        for single operations would keep the block from being compiled at all.
        """
        if recompute == "none":
            return
        has_dropout = any(module.p > 0 for module in self.modules() if isinstance(module, nn.Dropout))
        for block in self.blocks:
            block.forward = recomputing(block.forward, recompute, has_dropout)

    def group_blocks(self, num_blocks: int) -> None:
        """From now on `groups`, of `num_blocks` each, run in place of the blocks, which are theirs. Parameters keep the
        names that `blocks` gives them."""
        starts = range(0, len(self.blocks), num_blocks)
        self.groups = nn.ModuleList(BlockGroup(self.blocks[start : start + num_blocks]) for start in starts)

    def flops_per_sample(self) -> int:
        """Forward FLOPs of one sequence of full length in the blocks, as in Table 5: 2 per multiply-add, matrix
        products only. Heads with large products add theirs."""
        return round(2 * len(self.blocks) * self.multiply_adds_per_block)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Fills every parameter in place from a CPU generator, so the numbers are the same on any device.

        | Linear and embedding weights | N(0, 0.02) |
        | Linear biases                | 0          |
        | LayerNorm gain, bias         | 1, 0       |

        Each layer that has an `init_special_weights` then overwrites what this table gave it.
        """
        for module in self.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    noise = torch.randn(module.weight.shape, generator=generator, device="cpu")
                    module.weight.copy_(noise * INIT_STD)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        module.bias.zero_()
                case nn.LayerNorm() | nn.RMSNorm():
                    module.weight.fill_(1.0)
                    if getattr(module, "bias", None) is not None:
                        module.bias.zero_()
        for module in self.modules():
            if hasattr(module, "init_special_weights"):
                module.init_special_weights(generator)
