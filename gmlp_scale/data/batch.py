"""What passes from the data to the models: special token ids and the masked batch.

Shape legend: B batch, N positions, M masked positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that the workers that tokenize need not load torch
    import torch
    from torch import Tensor

PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = 0, 1, 2, 3, 4
SPECIAL_TOKENS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)

IGNORED = -100
"""Label of a slot without a prediction; the default `ignore_index` of torch's cross-entropy."""


def num_masked_positions(sequence_length: int, masked_fraction: float = 0.15) -> int:
    """Masked positions of every row, a fixed count: 77 of 512, 19 of 128 (BERT's 15 %, as in the paper's section 4)."""
    return round(sequence_length * masked_fraction)


@dataclass(frozen=True)
class MaskedBatch:
    """Rows with their masks applied and what stood under them."""

    token_ids_BN: Tensor
    """int64 [B, N], masks applied."""
    masked_positions_BM: Tensor
    """int64 [B, M], ascending and distinct in each row; M is the same for every row."""
    labels_BM: Tensor
    """int64 [B, M], the original ids; IGNORED in slots that a row with too few ordinary tokens cannot fill."""
    padded: bool = True
    """Whether attention is to be kept from <pad>; said here, since a model that looks would wait for its device."""

    def to(self, device: torch.device | str) -> MaskedBatch:
        """The same batch on `device`; the copies do not block the host when the memory is pinned."""
        return replace(
            self,
            token_ids_BN=self.token_ids_BN.to(device, non_blocking=True),
            masked_positions_BM=self.masked_positions_BM.to(device, non_blocking=True),
            labels_BM=self.labels_BM.to(device, non_blocking=True),
        )

    def split(self, num_rows: int) -> list[MaskedBatch]:
        """The batch in parts of `num_rows` rows, views of it."""
        parts = (self.token_ids_BN, self.masked_positions_BM, self.labels_BM)
        cut = zip(*(part.split(num_rows) for part in parts), strict=True)
        return [MaskedBatch(*tensors, self.padded) for tensors in cut]
