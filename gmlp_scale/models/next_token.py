"""Next-token prediction: the causal head, and its batches.

Shape suffixes: B batch, N positions, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.data.batch import Batch
from gmlp_scale.models.backbone import Backbone


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
