"""What the data gives to the models: the ids of special tokens, the masked batch and the batch of images.

Shape legend: B batch, N positions, M masked positions, 3 colours, H and W pixels of height and width.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the workers that tokenize do not load torch
    import numpy as np
    import torch
    from torch import Tensor

PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = 0, 1, 2, 3, 4
SPECIAL_TOKENS = ("<pad>", "<unk>", "<cls>", "<sep>", "<mask>")
NUM_SPECIAL_TOKENS = len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class SpecialIds:
    """The ids of a vocabulary's special tokens; None for one that it lacks."""

    end: int
    """Stands behind each document."""
    cls: int | None = None
    """Begins each row."""
    pad: int | None = None
    """Fills a row up. Without it, more end tokens do."""
    mask: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    """All special ids, as ascending ranges [first, stop). They are never masked."""

    def among(self, ids: np.ndarray) -> np.ndarray:
        """Where `ids` are special, bool of their shape."""
        parts = [(ids >= first) & (ids < stop) for first, stop in self.ranges]
        return functools.reduce(operator.or_, parts)

    def is_filler(self, ids_BN: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Where rows are filled up, bool [B, N]: with <pad>, or with end tokens behind an end token."""
        if self.pad is not None:
            return ids_BN == self.pad
        is_filler_BN = ids_BN == self.end
        is_filler_BN[:, 1:] &= ids_BN[:, :-1] == self.end
        is_filler_BN[:, 0] = False
        return is_filler_BN


OUR_SPECIAL_IDS = SpecialIds(SEP_ID, CLS_ID, PAD_ID, MASK_ID, ((0, NUM_SPECIAL_TOKENS),))
"""Those of every tokenizer that data_prep/train_tokenizer.py wrote."""

IGNORED = -100
"""Label of a slot without a prediction; the default `ignore_index` of torch's cross-entropy."""


def num_masked_positions(sequence_length: int, masked_fraction: float = 0.15) -> int:
    """How many positions of every row are masked: 77 of 512, 19 of 128 (BERT's 15 %, as in the paper's section 4)."""
    return round(sequence_length * masked_fraction)


MULTIPLE_OF_LENGTHS = 8
"""Lengths are rounded up to it: a program has fewer shapes to prepare for, and a GPU's products whole tiles."""


def longest_text(token_ids_BN: Tensor) -> int:
    """The length of the longest text among padded rows, rounded up. On a GPU the host waits for the device here."""
    last = int((token_ids_BN != PAD_ID).any(0).nonzero()[-1])
    return (last // MULTIPLE_OF_LENGTHS + 1) * MULTIPLE_OF_LENGTHS


class Batch:
    """A dataclass with tensors among its fields."""

    def cut_padding(self) -> Self:
        """The same rows, as long as their longest text, for a model that masks padding."""
        stop = longest_text(self.token_ids_BN)
        by_position = {name: tensor for name, tensor in vars(self).items() if name.endswith("_BN")}
        return replace(self, **{name: tensor[:, :stop] for name, tensor in by_position.items()})

    def to(self, device: torch.device | str) -> Self:
        """The same batch on `device`; copies from pinned memory do not block the host."""
        tensors = {name: value for name, value in vars(self).items() if hasattr(value, "to")}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


@dataclass(frozen=True)
class MaskedBatch(Batch):
    """Masked rows, and the tokens that the masks hide."""

    token_ids_BN: Tensor
    """int64 [B, N], masks applied."""
    masked_positions_BM: Tensor
    """int64 [B, M], ascending and distinct in each row; M is the same for every row."""
    labels_BM: Tensor
    """int64 [B, M], the original ids; IGNORED in slots that a row with too few ordinary tokens cannot fill."""
    padded: bool = True
    """Whether a model must mask <pad>, if it can. If it looked for <pad> itself, the host would wait for the device."""

    @classmethod
    def from_labels(cls, token_ids_BN: Tensor, labels_BN: Tensor) -> MaskedBatch:
        """The batch of token ids and a label for each position, as Hugging Face's collators give them.

        Args:
            token_ids_BN: int64, masks applied; may hold <pad>.
            labels_BN: int64, the original ids; IGNORED at positions without a prediction.

        Raises:
            ValueError: the shapes differ, or no position has a label.
        """
        is_ignored_BN = labels_BN == IGNORED
        if labels_BN.shape != token_ids_BN.shape or is_ignored_BN.all():
            found = f"labels of shape {tuple(labels_BN.shape)} beside token ids of shape {tuple(token_ids_BN.shape)}"
            raise ValueError(f"found {found}; needed: the same shape, and a label other than {IGNORED}")
        num_masked = int((~is_ignored_BN).sum(dim=1).max())
        # A stable sort puts each row's labels first, in their order. Rows with fewer labels take ignored positions too.
        positions_BM = is_ignored_BN.byte().argsort(dim=1, stable=True)[:, :num_masked].sort(dim=1).values
        return cls(token_ids_BN, positions_BM, labels_BN.gather(1, positions_BM))

    def split(self, num_rows: int) -> list[MaskedBatch]:
        """Parts of `num_rows` rows each, which are views of the batch."""
        parts = (self.token_ids_BN, self.masked_positions_BM, self.labels_BM)
        cut = zip(*(part.split(num_rows) for part in parts), strict=True)
        return [MaskedBatch(*tensors, self.padded) for tensors in cut]


@dataclass(frozen=True)
class ImageBatch(Batch):
    """Images, each of which may be a mixture of two that have a label each."""

    images_B3HW: Tensor
    """uint8 [B, 3, H, W], red, green and blue."""
    labels_B: Tensor
    """int64 [B]."""
    other_labels_B: Tensor
    """int64 [B], the labels of the images that were mixed in; where none was, as in `labels_B`."""
    shares_B: Tensor
    """float32 [B], the share of the label in `labels_B`; the other label has the rest."""
