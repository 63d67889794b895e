"""The models: the trunk with a head on it, and the batches of finetuning.

Pretraining has masked language modelling, whose output matrix is the token embedding. Finetuning has sequence
classification and span prediction.

Shape suffixes: B batch, N positions, M masked positions, D width, V vocabulary, C classes.
"""

from dataclasses import dataclass

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
    """x_BMD -> float32 logits_BMV = x E^T. No bias and no transform: with them the parameter counts would not be the
    paper's."""

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
            return self._row_losses(x_BMD, batch.labels_BM).mean()
        chunks = zip(x_BMD.split(rows_per_chunk), batch.labels_BM.split(rows_per_chunk), strict=True)
        losses = [
            checkpoint(self._row_losses, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
        ]
        return torch.cat(losses).mean()

    def predict(self, batch: MaskedBatch) -> Tensor:
        """Float32 logits_BMV at the masked positions."""
        return self.head(self._masked_states(batch))

    def flops_per_sample(self, num_masked: int) -> int:
        """Forward FLOPs of one sequence of full length, as in Table 5: 2 per multiply-add, matrix products only."""
        head = num_masked * self.embedding.embedding_dim * self.embedding.num_embeddings
        return 2 * (len(self.blocks) * self.multiply_adds_per_block + head)

    def _masked_states(self, batch: MaskedBatch) -> Tensor:
        # The final LayerNorm is per position, so only the masked positions need it.
        x_BND = self.encode(batch.token_ids_BN, padded=batch.padded)
        return self.norm(x_BND.take_along_dim(batch.masked_positions_BM.unsqueeze(-1), dim=1))

    def _row_losses(self, x_BMD: Tensor, labels_BM: Tensor) -> Tensor:
        logits_BMV = self.head(x_BMD)
        losses = F.cross_entropy(logits_BMV.flatten(0, 1), labels_BM.flatten(), ignore_index=IGNORED, reduction="none")
        num_valid_B = (labels_BM != IGNORED).sum(dim=1)
        return losses.view_as(labels_BM).sum(dim=1) / num_valid_B.clamp(min=1)


@dataclass(frozen=True)
class LabelledBatch:
    """Rows `<cls> A <sep>` or `<cls> A <sep> B <sep>`, padded to one length, and the label of each."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    labels_B: Tensor
    """int64 [B], the classes; float32 [B] in regression."""

    def to(self, device: torch.device | str) -> "LabelledBatch":
        return LabelledBatch(
            self.token_ids_BN.to(device, non_blocking=True), self.labels_B.to(device, non_blocking=True)
        )


def label_loss(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the rows. A single class is regression: its mean squared error."""
    if logits_BC.shape[1] == 1:
        return F.mse_loss(logits_BC[:, 0], labels_B.to(logits_BC.dtype))
    return F.cross_entropy(logits_BC, labels_B)


class SequenceClassifier(Backbone):
    """LabelledBatch -> scalar float32 loss. A Linear reads the last layer at <cls>, the first position (section 4).

    In regression it has one class, whose logit is the predicted number.
    """

    def __init__(self, *, num_classes: int, **backbone):
        super().__init__(**backbone)
        self.classifier = nn.Linear(self.embedding.embedding_dim, num_classes)

    def forward(self, batch: LabelledBatch) -> Tensor:
        """`label_loss` of the batch."""
        return label_loss(self.predict(batch), batch.labels_B)

    def predict(self, batch: LabelledBatch) -> Tensor:
        """Float32 logits_BC."""
        return self.logits(self.norm(self.encode(batch.token_ids_BN)[:, 0]))

    def logits(self, x_BD: Tensor) -> Tensor:
        """Float32 logits_BC from <cls> after the final LayerNorm."""
        return self.classifier(self.dropout(x_BD)).float()

    def flops_per_sample(self) -> int:
        """Forward FLOPs of one sequence of full length, without the head's, which are few."""
        return 2 * len(self.blocks) * self.multiply_adds_per_block


@dataclass(frozen=True)
class SpanBatch:
    """Rows `<cls> question <sep> window of the context <sep>`, padded to one length, and where each row's answer is."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    first_positions_B: Tensor
    """int64 [B], of the answer's first token; 0, the position of <cls>, in a row without the answer."""
    last_positions_B: Tensor
    """int64 [B], of the answer's last token; 0 in a row without the answer."""

    def to(self, device: torch.device | str) -> "SpanBatch":
        return SpanBatch(
            self.token_ids_BN.to(device, non_blocking=True),
            self.first_positions_B.to(device, non_blocking=True),
            self.last_positions_B.to(device, non_blocking=True),
        )


class SpanPredictor(Backbone):
    """SpanBatch -> scalar float32 loss. Each position has two logits: that the answer begins there, and ends there."""

    def __init__(self, **backbone):
        super().__init__(**backbone)
        self.spans = nn.Linear(self.embedding.embedding_dim, 2)

    def forward(self, batch: SpanBatch) -> Tensor:
        """The mean of two cross-entropies over positions, for the first and for the last token, averaged over rows."""
        first_logits_BN, last_logits_BN = self.predict(batch).unbind(-1)
        first_loss = F.cross_entropy(first_logits_BN, batch.first_positions_B)
        return (first_loss + F.cross_entropy(last_logits_BN, batch.last_positions_B)) / 2

    def predict(self, batch: SpanBatch) -> Tensor:
        """Float32 logits_BN2."""
        return self.logits(self.norm(self.encode(batch.token_ids_BN)))

    def logits(self, x_BND: Tensor) -> Tensor:
        """Float32 logits_BN2 from the positions after the final LayerNorm."""
        return self.spans(x_BND).float()

    def flops_per_sample(self) -> int:
        """Forward FLOPs of one sequence of full length, without the head's, which are few."""
        return 2 * len(self.blocks) * self.multiply_adds_per_block
