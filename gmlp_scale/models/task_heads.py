"""The heads beside masked language modelling, and their batches: sequence and token classification, spans, next tokens.

Shape suffixes: B batch, N positions, D width, C classes, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.data.batch import IGNORED, PAD_ID, Batch
from gmlp_scale.models.backbone import Backbone


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Rows `<cls> A <sep>` or `<cls> A <sep> B <sep>`, padded to one length, and the label of each."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    labels_B: Tensor
    """int64 [B], the classes; float32 [B] in regression."""


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

    def logits(self, x: Tensor) -> Tensor:
        """Float32 logits [..., C] of x [..., D], what the final LayerNorm gives."""
        return self.classifier(self.dropout(x)).float()


@dataclass(frozen=True)
class TaggedBatch(Batch):
    """Rows `<cls> words <sep>`, padded to one length, and the class of each word at its first token."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    labels_BN: Tensor
    """int64 [B, N]; IGNORED elsewhere."""


class TokenTagger(SequenceClassifier):
    """TaggedBatch -> scalar float32 loss. The same Linear reads the last layer at every position."""

    def forward(self, batch: TaggedBatch) -> Tensor:
        """Cross-entropy in nats: the mean over the rows of each row's mean over its labels, 0 for a row without any."""
        losses_BN = F.cross_entropy(self.predict(batch).transpose(1, 2), batch.labels_BN, reduction="none")
        num_labels_B = (batch.labels_BN != IGNORED).sum(1).clamp(min=1)
        return (losses_BN.sum(1) / num_labels_B).mean()

    def predict(self, batch: TaggedBatch) -> Tensor:
        """Float32 logits_BNC."""
        return self.logits(self.norm(self.encode(batch.token_ids_BN)))


@dataclass(frozen=True)
class SpanBatch(Batch):
    """Rows `<cls> question <sep> window of the context <sep>`, padded to one length, and where each row's answer is."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    first_positions_B: Tensor
    """int64 [B], of the answer's first token; 0, the position of <cls>, in a row without the answer."""
    last_positions_B: Tensor
    """int64 [B], of the answer's last token; 0 in a row without the answer."""


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
        """Float32 logits_BN2. They are -inf at <pad> if the model masks it: the loss does not depend on it either."""
        logits_BN2 = self.logits(self.norm(self.encode(batch.token_ids_BN)))
        is_token_BN = self.tokens(batch.token_ids_BN != PAD_ID)
        return logits_BN2 if is_token_BN is None else logits_BN2.masked_fill(~is_token_BN[:, :, None], -torch.inf)

    def logits(self, x_BND: Tensor) -> Tensor:
        """Float32 logits_BN2 from the positions after the final LayerNorm."""
        return self.spans(x_BND).float()


@dataclass(frozen=True)
class NextTokenBatch(Batch):
    """Rows of tokens, and the token that follows each."""

    token_ids_BN: Tensor
    """int64 [B, N]."""
    next_ids_BN: Tensor
    """int64 [B, N]."""


class NextTokenModel(Backbone):
    """NextTokenBatch -> scalar float32 loss. Its blocks must be causal. An output matrix of its own, with a bias.

    Unlike the encoders it has no dropout after the embedding, since MLP-Attention's public code has none there.
    """

    def __init__(self, *, dropout: float, **backbone):
        super().__init__(**backbone)
        self.output = nn.Linear(self.embedding.embedding_dim, self.embedding.num_embeddings)

    def forward(self, batch: NextTokenBatch) -> Tensor:
        """Mean cross-entropy in nats over all positions."""
        return F.cross_entropy(self.predict(batch).flatten(0, 1), batch.next_ids_BN.flatten())

    def predict(self, batch: NextTokenBatch) -> Tensor:
        """Float32 logits_BNV."""
        return self.output(self.norm(self.encode(batch.token_ids_BN, padded=False))).float()

    def flops_per_sample(self) -> int:
        """Forward FLOPs of one sequence of full length."""
        head = self.sequence_length * self.embedding.embedding_dim * self.embedding.num_embeddings
        return super().flops_per_sample() + 2 * head
