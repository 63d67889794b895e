"""The head of images: patches, the loss of mixtures, stochastic depth."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.models import build_model
from gmlp_scale.models.image_classifier import ImageClassifier, PatchEmbedding, StochasticDepth
from tests.models.every_kind import FAMILIES, perturb, tiny_config


def image_model(kind: str = "gmlp-dense", num_blocks: int = 2, **head) -> ImageClassifier:
    config = tiny_config(kind, sequence_length=9, vocab_size=5, num_blocks=num_blocks)
    return perturb(build_model(config, head=partial(ImageClassifier, patch_size=4, **head)), 0.1)


def image_batch(num_images: int = 4, size: int = 12) -> ImageBatch:
    generator = torch.Generator().manual_seed(3)
    images_B3HW = torch.randint(0, 256, (num_images, 3, size, size), generator=generator, dtype=torch.uint8)
    labels_B = torch.arange(num_images) % 5
    return ImageBatch(images_B3HW, labels_B, (labels_B + 1) % 5, torch.linspace(0, 1, num_images))


def test_patches_are_embedded_as_by_a_convolution():
    images_B3HW = image_batch().images_B3HW
    embedding = PatchEmbedding(4, images_B3HW.shape[-1], 6)
    kernel = embedding.weight.view(6, 3, 4, 4)
    expected_BDYX = F.conv2d(images_B3HW / 127.5 - 1, kernel, embedding.bias, stride=4)
    torch.testing.assert_close(embedding(images_B3HW), expected_BDYX.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_learns_from_every_parameter(kind):
    model = image_model(kind)
    model(image_batch()).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_the_order_of_the_patches_matters():
    model, batch = image_model().eval(), image_batch()
    turned = ImageBatch(batch.images_B3HW.flip(-1), batch.labels_B, batch.other_labels_B, batch.shares_B)
    assert (model.predict(batch) - model.predict(turned)).abs().max() > 1e-3


def test_a_mixture_has_the_loss_of_both_labels_by_their_shares():
    model, batch = image_model(label_smoothing=0.1), image_batch()
    log_probabilities_BC = model.predict(batch).log_softmax(-1)
    targets_BC = torch.full((4, 5), 0.1 / 5)
    for row, (label, other, share) in enumerate(zip(*(vars(batch)[n] for n in LABELS), strict=True)):
        targets_BC[row, label] += 0.9 * share
        targets_BC[row, other] += 0.9 * (1 - share)
    torch.testing.assert_close(model(batch), -(targets_BC * log_probabilities_BC).sum(1).mean())


LABELS = ("labels_B", "other_labels_B", "shares_B")


def test_stochastic_depth_rises_by_block_and_drops_whole_samples():
    model = image_model(num_blocks=5, survival_probability=0.8)
    assert [block.dropout.p for block in model.blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    torch.manual_seed(0)
    branch_BND = StochasticDepth(0.25).train()(torch.ones(1000, 3, 2))
    kept_B = branch_BND[:, 0, 0] > 0
    assert kept_B.float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert torch.equal(branch_BND, kept_B[:, None, None] * torch.full((1000, 3, 2), 4 / 3))
    assert torch.equal(StochasticDepth(0.25).eval()(branch_BND), branch_BND)


def test_recomputing_draws_the_same_dropped_branches():
    losses, gradients = [], []
    for recompute in ("none", "full"):
        model = image_model(num_blocks=3, survival_probability=0.5)
        model.set_recompute(recompute)
        torch.manual_seed(1)
        loss = model(image_batch())
        loss.backward()
        losses.append(loss.item())
        gradients.append(model.blocks[2].expand.weight.grad)
    assert losses[0] == losses[1] and torch.equal(*gradients)


def test_images_of_another_size_are_refused():
    with pytest.raises(ValueError, match="needed: 3 x 12 x 12"):
        image_model().predict(image_batch(size=16))
