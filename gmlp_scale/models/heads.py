"""Masked language modelling: the trunk with a head whose output matrix is the token embedding.

Shape suffixes: B batch, N positions, M masked positions, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gmlp_scale.data.batch import IGNORED, MaskedBatch
from gmlp_scale.models.backbone import Backbone

MAX_LOGITS_PER_CHUNK = 2**28
"""A batch with more logits is split into chunks of rows, which are computed again in the backward pass. A logit takes
at most 12 bytes, so the loss never takes more than 3 GiB. Every recipe's micro-batch is one chunk: the largest has
156 M logits. That is cheap: 58 KB per token, where the blocks of gMLP base keep 480 KB or more."""


class MaskedTokenHead(nn.Module):
    """x_BMD -> float32 logits_BMV = x E^T. A bias or a transform would give other parameter counts than the paper's."""

    def __init__(self, embedding_weight_VD: nn.Parameter):
        super().__init__()
        # Registered here as well, so that an engine that shards parameters gathers it for this module.
        self.weight = embedding_weight_VD

    def forward(self, x_BMD: Tensor) -> Tensor:
        return _TiedLinear.apply(x_BMD, self.weight).float()


class _TiedLinear(torch.autograd.Function):
    """x W^T, which returns W's gradient as a new tensor, so that autograd adds the embedding's gradient in place.

    F.linear's gradient of W is a view, so autograd would add both gradients into a third tensor.
    """

    @staticmethod
    def forward(ctx, x_BMD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BMD, weight_VD)
        return F.linear(x_BMD, weight_VD)

    @staticmethod
    def backward(ctx, grad_BMV: Tensor) -> tuple[Tensor, Tensor]:
        # Under autocast the gradient may have another dtype than what was saved.
        x_BMD, weight_VD = (saved.to(grad_BMV.dtype) for saved in ctx.saved_tensors)
        return grad_BMV @ weight_VD, grad_BMV.flatten(0, -2).T @ x_BMD.flatten(0, -2)


class MaskedLanguageModel(Backbone):
    """MaskedBatch -> scalar float32 loss."""

    def __init__(self, **backbone):
        super().__init__(**backbone)
        self.head = MaskedTokenHead(self.embedding.weight)

    def forward(self, batch: MaskedBatch) -> Tensor:
        """Mean over rows of each row's mean cross-entropy in nats over its valid masked positions.

        So the mean over equal micro-batches and ranks is the loss of the global batch. A row without a valid position
        counts as zero.
        """
        x_BMD = self._masked_states(batch)
        rows_per_chunk = max(1, MAX_LOGITS_PER_CHUNK // (x_BMD.shape[1] * self.embedding.num_embeddings))
        if len(x_BMD) <= rows_per_chunk:
            return self.row_losses(x_BMD, batch.labels_BM).mean()
        chunks = zip(x_BMD.split(rows_per_chunk), batch.labels_BM.split(rows_per_chunk), strict=True)
        losses = [
            checkpoint(self.row_losses, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
        ]
        return torch.cat(losses).mean()

    def predict(self, batch: MaskedBatch) -> Tensor:
        """Float32 logits_BMV at the masked positions."""
        return self.head(self._masked_states(batch))

    def flops_per_sample(self, num_masked: int) -> int:
        """Forward FLOPs of one sequence of full length, as in Table 5."""
        head = num_masked * self.embedding.embedding_dim * self.embedding.num_embeddings
        return super().flops_per_sample() + 2 * head

    def _masked_states(self, batch: MaskedBatch) -> Tensor:
        # The final LayerNorm is per position, so only the masked positions need it.
        x_BND = self.encode(batch.token_ids_BN, padded=batch.padded)
        return self.norm(x_BND.take_along_dim(batch.masked_positions_BM.unsqueeze(-1), dim=1))

    def row_losses(self, x_BMD: Tensor, labels_BM: Tensor) -> Tensor:
        """Losses_B. Compiled, it keeps 2 bytes a logit for the backward pass instead of 8, and no float32 logits."""
        logits_BMV = self.head(x_BMD)
        losses = F.cross_entropy(logits_BMV.flatten(0, 1), labels_BM.flatten(), ignore_index=IGNORED, reduction="none")
        num_valid_B = (labels_BM != IGNORED).sum(dim=1)
        return losses.view_as(labels_BM).sum(dim=1) / num_valid_B.clamp(min=1)
