"""What is done to training images repeats, and evaluation sees the plain centre."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from gmlp_scale.data.augmentation import Augmentation, AugmentationConfig, centre_crop
from gmlp_scale.data.batch import ImageBatch

PLAIN = {
    "crop_scale": (1, 1), "flip": False, "policy": "none", "mixup_alpha": 0, "cutmix_alpha": 0, "label_smoothing": 0,
}  # fmt: skip


def jpeg(width: int, height: int) -> tuple[bytes, torch.Tensor]:
    """A smooth picture as a file, and its decoded pixels, uint8 [3, H, W]."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    pixels = np.stack([255 * x, 255 * y, 255 * x * y], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue(), torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)


def augmentation(size: int = 32, **changes) -> Augmentation:
    return Augmentation(AugmentationConfig(**PLAIN | changes), size, seed=7)


@pytest.mark.parametrize("policy", ["autoaugment", "randaugment"])
def test_an_image_follows_from_its_seed_epoch_and_row(policy):
    content, _ = jpeg(60, 40)
    changes = {"crop_scale": (0.08, 1.0), "flip": True, "policy": policy}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    image = augmentation(**changes).image(content, 1, 10)
    assert torch.equal(torch.get_rng_state(), before)  # dropout's numbers are as if there were no images
    torch.manual_seed(6)
    again = augmentation(**changes)
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8
    assert torch.equal(again.image(content, 1, 10), image)
    others = [again.image(content, 2, 10), again.image(content, 1, 11)]
    assert not any(torch.equal(other, image) for other in others)


def test_crops_are_parts_of_the_image_and_half_are_mirrored():
    content, _ = jpeg(48, 48)
    whole = augmentation(48).image(content, 0, 0)
    torch.testing.assert_close(whole, jpeg(48, 48)[1])
    flipping, cropping = augmentation(48, flip=True), augmentation(48, crop_scale=(0.2, 0.5))
    images = [flipping.image(content, 0, row) for row in range(100)]
    num_flipped = sum(torch.equal(image, whole.flip(-1)) for image in images)
    assert num_flipped + sum(torch.equal(image, whole) for image in images) == 100
    assert 30 < num_flipped < 70
    for row in range(20):  # red rises to the right by 255 over the whole width
        red_HW = cropping.image(content, 0, row)[0].float()
        width = (red_HW[:, -1] - red_HW[:, 0]).mean().item() / 255
        assert 0.2 * 0.75**0.5 < width < (0.5 * 4 / 3) ** 0.5 + 0.05


def _two_colours(num_pairs: int) -> tuple[ImageBatch, np.ndarray, np.ndarray]:
    """Black images of label 0 beside white images of label 1."""
    num_images = 2 * num_pairs
    images_B3HW = torch.zeros(num_images, 3, 32, 32, dtype=torch.uint8)
    images_B3HW[1::2] = 255
    labels_B = torch.arange(num_images) % 2
    batch = ImageBatch(images_B3HW, labels_B, labels_B, torch.ones(num_images))
    return batch, np.zeros(num_images, np.int64), np.arange(num_images)


@pytest.mark.parametrize("alphas", [(0.8, 0), (0, 1.0), (0.8, 1.0)])
def test_shares_of_labels_are_those_of_the_pixels(alphas):
    batch, epochs_B, rows_B = _two_colours(100)
    mixing = augmentation(mixup_alpha=alphas[0], cutmix_alpha=alphas[1])
    mixed = mixing.mixed(batch, epochs_B, rows_B)
    white_B = mixed.images_B3HW.float().mean((1, 2, 3)) / 255
    expected_B = torch.where(mixed.labels_B == 1, mixed.shares_B, 1 - mixed.shares_B)
    torch.testing.assert_close(white_B, expected_B, atol=0.003, rtol=0)
    assert torch.equal(mixed.other_labels_B, 1 - mixed.labels_B)
    assert mixed.shares_B.std() > 0.2
    is_cutmix_B = ((mixed.images_B3HW == 0) | (mixed.images_B3HW == 255)).flatten(1).all(1)
    assert is_cutmix_B.float().mean().item() == pytest.approx(
        float(alphas[1] > 0) if 0 in alphas else 0.5, abs=0.12
    )  # a share near 0 or 1 rounds to one colour
    later = slice(100, 200)  # the same pairs in another micro-batch
    part = ImageBatch(*(tensor[later] for tensor in vars(batch).values()))
    assert torch.equal(mixing.mixed(part, epochs_B[later], rows_B[later]).images_B3HW, mixed.images_B3HW[later])


def test_evaluation_sees_the_centre():
    content, pixels_3HW = jpeg(300, 256)
    torch.testing.assert_close(centre_crop(content, 224), pixels_3HW[:, 16:240, 38:262])
    content, pixels_3HW = jpeg(64, 64)
    half_3HW = centre_crop(content, 28).float()
    expected_3HW = torch.nn.functional.avg_pool2d(pixels_3HW[:, 4:60, 4:60].float(), 2)
    assert (half_3HW - expected_3HW).abs().max() < 4


def test_grey_images_have_three_equal_colours():
    file = io.BytesIO()
    Image.fromarray(np.full((28, 28), 90, np.uint8)).save(file, "JPEG")
    assert torch.equal(centre_crop(file.getvalue(), 28), torch.full((3, 28, 28), 90, dtype=torch.uint8))


@pytest.mark.parametrize("crop_scale", [(0, 1), (0.5, 0.2), (0.5, 1.5)])
def test_crops_must_be_parts_of_images(crop_scale):
    with pytest.raises(ValueError, match="crop_scale"):
        AugmentationConfig(crop_scale=crop_scale)
