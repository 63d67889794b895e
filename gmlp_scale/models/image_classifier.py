"""Classification of images: patches instead of tokens, and stochastic depth ("Pay Attention to MLPs", section 3).

Shape suffixes: B batch, N positions (patches), D width, C classes, 3 colours, H and W pixels of height and width.
"""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.models.backbone import Backbone

NUM_COLOURS = 3
NORM_EPS = 1e-6
"""timm's, so that its weights give the same logits here; the gates' norms keep torch's 1e-5, as in timm."""


class PatchEmbedding(nn.Linear):
    """uint8 images_B3HW -> x_BND, a Linear on each square patch; the patches are in reading order.

    Pixels go from 0..255 to -1..1, the range of timm's gMLP. Images of another size are a ValueError.
    """

    def __init__(self, patch_size: int, image_size: int, d_model: int):
        super().__init__(NUM_COLOURS * patch_size**2, d_model)
        self.patch_size, self.image_size = patch_size, image_size

    def forward(self, images_B3HW: Tensor) -> Tensor:
        if images_B3HW.shape[1:] != (NUM_COLOURS, self.image_size, self.image_size):
            needed = f"{NUM_COLOURS} x {self.image_size} x {self.image_size}"
            raise ValueError(f"the images are {list(images_B3HW.shape[1:])}; needed: {needed}, as the model was made")
        size = self.patch_size
        patches_B3YXHW = images_B3HW.unfold(2, size, size).unfold(3, size, size)
        patches_BNP = patches_B3YXHW.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return super().forward((patches_BNP.float() / 127.5 - 1).to(self.weight.dtype))


class StochasticDepth(nn.Dropout):
    """Drops a residual branch of whole samples with probability p, and scales the others' by 1 / (1 - p)."""

    def forward(self, branch_BND: Tensor) -> Tensor:
        if not self.training or not self.p:
            return branch_BND
        return branch_BND * F.dropout(branch_BND.new_ones(len(branch_BND), 1, 1), self.p)


class ImageClassifier(Backbone):
    """ImageBatch -> scalar float32 loss. A Linear reads the mean over the patches after the final LayerNorm.

    vocab_size is the number of classes: there is no token to embed.

    Args:
        survival_probability: of the last block's residual branches. It falls from 1 at the first block in even steps,
            as in DeiT.
        label_smoothing: the share of every label that all classes divide evenly, in the loss alone.
    """

    def __init__(
        self,
        *,
        patch_size: int,
        survival_probability: float = 1.0,
        label_smoothing: float = 0.0,
        vocab_size: int,
        d_model: int,
        **backbone,
    ):
        super().__init__(vocab_size=vocab_size, d_model=d_model, **backbone)
        self.image_size = isqrt(self.sequence_length) * patch_size
        self.label_smoothing = label_smoothing
        # In place of the token embedding, which the trunk has just made.
        self.embedding = PatchEmbedding(patch_size, self.image_size, d_model)
        rates = torch.linspace(0, 1 - survival_probability, len(self.blocks), device="cpu").tolist()
        for block, rate in zip(self.blocks, rates, strict=True):
            block.dropout = StochasticDepth(rate)
            block.norm.eps = NORM_EPS
        self.norm.eps = NORM_EPS
        self.classifier = nn.Linear(d_model, vocab_size)

    def encode(self, images_B3HW: Tensor, *, padded: bool = False) -> Tensor:
        """x_BND after the last block and before the final LayerNorm. No patch is padding."""
        return super().encode(images_B3HW, padded=False)

    def forward(self, batch: ImageBatch) -> Tensor:
        """Mean over the images of the cross-entropy in nats, of mixed images by the labels' shares."""
        logits_BC = self.predict(batch)
        losses_B, other_losses_B = (
            F.cross_entropy(logits_BC, labels_B, label_smoothing=self.label_smoothing, reduction="none")
            for labels_B in (batch.labels_B, batch.other_labels_B)
        )
        return torch.lerp(other_losses_B, losses_B, batch.shares_B).mean()

    def predict(self, batch: ImageBatch) -> Tensor:
        """Float32 logits_BC."""
        return self.logits(self.norm(self.encode(batch.images_B3HW)))

    def logits(self, x_BND: Tensor) -> Tensor:
        """Float32 logits_BC from the patches after the final LayerNorm."""
        return self.classifier(x_BND.mean(1)).float()

    def flops_per_sample(self) -> int:
        """Forward FLOPs of one image, as in Table 1."""
        ends = self.sequence_length * self.embedding.weight.numel() + self.classifier.weight.numel()
        return super().flops_per_sample() + 2 * ends
