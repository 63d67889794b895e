"""What is done to an image before the model sees it: random changes in training, a crop of its centre in evaluation.

All that is random follows from the seed, the epoch and the row, so a resumed run repeats it. Pillow decodes, crops and
resizes. kornia draws the crops and has AutoAugment and RandAugment. The ones of torchvision and timm cannot be used,
since no build of torchvision fits the pinned torch.

Shape suffixes: B batch, 3 colours, H and W pixels of height and width.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from pydantic import BaseModel, model_validator
from torch import Tensor

from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.data.hashing import hash64
from gmlp_scale.fields import NotNegative, Positive, Share

CENTRE_CROP = 0.875
"""The share of the shorter side that an evaluation crops."""
_ONE_IMAGE, _PAIR = 1, 2  # the first word of a seed
_RAND_AUGMENT = {"n": 2, "m": 9}
"""Two operations of magnitude 9 out of 30, as in DeiT."""


class AugmentationConfig(BaseModel, frozen=True, extra="forbid"):
    crop_scale: tuple[Positive, Positive] = (0.08, 1.0)
    """The least and the largest share of an image's area that a random crop takes. Its sides are in a ratio of 3:4 to
    4:3. [fraction]"""
    flip: bool = True
    """Mirrors half of the images, chosen at random."""
    policy: Literal["none", "autoaugment", "randaugment"] = "autoaugment"
    """autoaugment: the policy that was found for ImageNet. randaugment: two operations of magnitude 9."""
    mixup_alpha: NotNegative = 0.8
    """Mixes two images by a share from Beta(alpha, alpha); 0 never does. [no unit]"""
    cutmix_alpha: NotNegative = 1.0
    """Pastes a rectangle of another image, whose share of the area is from Beta(alpha, alpha); 0 never does. With both,
    a random half of the pairs gets Mixup and the other half CutMix. [no unit]"""
    label_smoothing: Share = 0.1
    """The share of every label that all classes divide evenly. [fraction]"""

    @model_validator(mode="after")
    def _crops_are_parts(self):
        least, largest = self.crop_scale
        if not 0 < least <= largest <= 1:
            raise ValueError(f"crop_scale is {[least, largest]}; needed: two shares above 0 and up to 1 that ascend")
        return self

    @property
    def mixes(self) -> bool:
        return bool(self.mixup_alpha or self.cutmix_alpha)


class Augmentation:
    """Makes training images of `image_size` x `image_size`."""

    def __init__(self, config: AugmentationConfig, image_size: int, seed: int):
        from kornia.augmentation import RandomResizedCrop
        from kornia.augmentation.auto import AutoAugment, RandAugment

        self._config, self._size, self._seed = config, image_size, seed
        self._crop = RandomResizedCrop((image_size, image_size), scale=config.crop_scale)
        match config.policy:
            case "none":
                self._policy = None
            case "autoaugment":
                self._policy = AutoAugment("imagenet")
            case "randaugment":
                self._policy = RandAugment(**_RAND_AUGMENT)

    def image(self, jpeg: bytes, epoch: int, row_index: int) -> Tensor:
        """One image, uint8 [3, H, W]."""
        with _drawing_from(_ONE_IMAGE, self._seed, epoch, row_index):
            return self._changed(_decoded(jpeg))

    def _changed(self, image: Image.Image) -> Tensor:
        # Pillow resizes with antialiasing, and only the part that is wanted.
        corners_42 = self._crop.forward_parameters((1, 3, image.height, image.width))["src"][0]
        left, top = corners_42.amin(0).tolist()
        right, bottom = (corners_42.amax(0) + 1).tolist()
        box = (left, top, min(right, image.width), min(bottom, image.height))
        image = image.resize((self._size, self._size), Image.Resampling.BICUBIC, box=box)
        if self._config.flip and torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        image_3HW = _tensor(image)
        if self._policy is not None:
            image_3HW = _rounded(self._policy(image_3HW[None] / 255)[0] * 255)
        return image_3HW

    def mixed(self, batch: ImageBatch, epochs_B: np.ndarray, row_indices_B: np.ndarray) -> ImageBatch:
        """Mixes each image with its neighbour in the order, the first with the second and the second with the first.

        So neither the ranks nor the size of micro-batches decide who is mixed with whom.
        """
        if not self._config.mixes:
            return batch
        images_B3HW, shares_B = batch.images_B3HW.clone(), batch.shares_B.clone()
        for first in range(0, len(images_B3HW), 2):
            pair = slice(first, first + 2)
            with _drawing_from(_PAIR, self._seed, int(epochs_B[first]), *row_indices_B[pair].tolist()):
                images_B3HW[pair], share = self._mixed_pair(batch.images_B3HW[pair])
            shares_B[pair] = share
        other_labels_B = batch.labels_B.view(-1, 2).flip(1).flatten()
        return ImageBatch(images_B3HW, batch.labels_B, other_labels_B, shares_B)

    def _mixed_pair(self, images_23HW: Tensor) -> tuple[Tensor, float]:
        """The mixed pair, and the share of itself that each image keeps."""
        mixup, cutmix = self._config.mixup_alpha, self._config.cutmix_alpha
        others_23HW = images_23HW.flip(0)
        if mixup and not (cutmix and torch.rand(()) < 0.5):
            share = torch.distributions.Beta(mixup, mixup).sample().item()
            return _rounded(torch.lerp(others_23HW.float(), images_23HW.float(), share)), share
        share = torch.distributions.Beta(cutmix, cutmix).sample().item()
        side = round(self._size * (1 - share) ** 0.5)
        # The rectangle's centre; the image's edges cut the rectangle.
        top, left = (torch.rand(2) * (self._size + 1)).long().tolist()
        rows = slice(max(0, top - side // 2), min(self._size, top - side // 2 + side))
        columns = slice(max(0, left - side // 2), min(self._size, left - side // 2 + side))
        mixed_23HW = images_23HW.clone()
        mixed_23HW[:, :, rows, columns] = others_23HW[:, :, rows, columns]
        pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed_23HW, 1 - pasted / self._size**2


def centre_crop(jpeg: bytes, image_size: int) -> Tensor:
    """The centre of an image, CENTRE_CROP of its shorter side, as uint8 [3, H, W]."""
    image = _decoded(jpeg)
    shorter = round(image_size / CENTRE_CROP)
    width, height = (shorter * side // min(image.size) for side in image.size)
    left, top = (width - image_size) // 2, (height - image_size) // 2
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    return _tensor(image.crop((left, top, left + image_size, top + image_size)))


def _decoded(jpeg: bytes) -> Image.Image:
    return Image.open(io.BytesIO(jpeg)).convert("RGB")


def _tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _rounded(pixels: Tensor) -> Tensor:
    return pixels.round().clamp(0, 255).to(torch.uint8)


@contextmanager
def _drawing_from(*words: int) -> Iterator[None]:
    """Torch's random numbers follow from these words while the body runs, and go on as before after it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(hash64(*words)[0] >> np.uint64(1)))  # manual_seed takes 63 bits
        yield
