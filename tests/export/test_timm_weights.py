"""Weights to and from timm's names. timm imports torchvision, which is not here, so its gMLP is written out below."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gmlp_scale.checkpoint.trained import TrainedModelError, copy_weights
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.export.timm_weights import from_timm, to_timm
from gmlp_scale.models import build_model
from gmlp_scale.models.gmlp import GmlpConfig
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.train.start import load_recipe
from tests.models.every_kind import KINDS, tiny_config

SIZES = {"num_blocks": 3, "d_model": 16, "d_ffn": 96, "sequence_length": 16, "vocab_size": 7}
GMLP_S16_224 = {"num_blocks": 30, "d_model": 256, "d_ffn": 1536, "sequence_length": 196, "vocab_size": 1000}


class TimmGate(nn.Module):
    def __init__(self, width: int, num_patches: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(num_patches, num_patches)

    def forward(self, x):
        u, v = x.chunk(2, dim=-1)
        return u * self.proj(self.norm(v).transpose(-1, -2)).transpose(-1, -2)


class TimmMlp(nn.Module):
    def __init__(self, width: int, hidden: int, num_patches: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.gate = TimmGate(hidden // 2, num_patches)
        self.fc2 = nn.Linear(hidden // 2, width)

    def forward(self, x):
        return self.fc2(self.gate(nn.functional.gelu(self.fc1(x))))


class TimmBlock(nn.Module):
    def __init__(self, width: int, hidden: int, num_patches: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp_channels = TimmMlp(width, hidden, num_patches)

    def forward(self, x):
        return x + self.mlp_channels(self.norm(x))


class TimmGmlp(nn.Module):
    """The parameter names, the shapes and the mathematics of MlpMixer with SpatialGatingBlock in timm 1.0."""

    def __init__(
        self, num_blocks: int, d_model: int, d_ffn: int, sequence_length: int, vocab_size: int, patch_size: int = 4
    ):
        super().__init__()
        self.stem = nn.ModuleDict({"proj": nn.Conv2d(3, d_model, kernel_size=patch_size, stride=patch_size)})
        self.blocks = nn.Sequential(*(TimmBlock(d_model, d_ffn, sequence_length) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, images):
        x = self.stem["proj"](images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def our_model(model: GmlpConfig, patch_size: int = 4) -> ImageClassifier:
    return build_model(model, head=partial(ImageClassifier, patch_size=patch_size), seed=None).eval()


def randomise(model: nn.Module, std: float) -> None:
    for parameter in model.parameters():
        parameter.normal_(std=std)


def random_images(num_images: int, size: int) -> tuple[ImageBatch, torch.Tensor]:
    """A batch for our model, and the same for timm's."""
    images_B3HW = torch.randint(0, 256, (num_images, 3, size, size), dtype=torch.uint8)
    return ImageBatch(images_B3HW, None, None, None), images_B3HW / 127.5 - 1


@torch.no_grad()
def test_both_ways_give_the_same_logits():
    torch.manual_seed(0)
    theirs = TimmGmlp(**SIZES)
    randomise(theirs, std=0.3)
    batch, normalised = random_images(5, size=16)
    model, patch_size, weights = from_timm(theirs.state_dict())
    assert (model, patch_size) == (GmlpConfig(**SIZES, spatial="dense"), 4)
    ours = our_model(model)
    copy_weights(ours, weights)
    torch.testing.assert_close(ours.predict(batch), theirs(normalised), atol=1e-4, rtol=1e-4)

    back = our_model(model)
    randomise(back, std=0.3)
    theirs.load_state_dict(to_timm(model, dict(back.named_parameters()), patch_size))
    torch.testing.assert_close(theirs(normalised), back.predict(batch), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_gmlp_s16_224_is_our_gmlp_s():
    """Of timm 1.0.31's own model: 306 tensors, 19,422,656 parameters."""
    torch.manual_seed(0)
    theirs = TimmGmlp(**GMLP_S16_224, patch_size=16)
    randomise(theirs, std=0.02)
    state, recipe = theirs.state_dict(), load_recipe(Path(__file__).parents[2] / "configs/images/gmlp_s.yaml")
    assert (len(state), sum(tensor.numel() for tensor in state.values())) == (306, 19_422_656)
    model, patch_size, weights = from_timm(state)
    assert (model, patch_size) == (recipe.model, recipe.patch_size)
    ours = our_model(model, patch_size)
    copy_weights(ours, weights)
    back = to_timm(model, dict(ours.named_parameters()), patch_size)
    assert back.keys() == state.keys() and all(torch.equal(back[name], tensor) for name, tensor in state.items())
    batch, normalised = random_images(1, size=224)
    torch.testing.assert_close(ours.predict(batch), theirs(normalised), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("head.weight", None, "head.weight is missing and should be (7, 16)"),
        ("head.bias", None, "it lacks 'head.bias'"),
        ("head.weight", (7, 17), "head.weight is (7, 17) and should be (7, 16)"),
        ("blocks.1.mlp_channels.fc2.bias", (), "fc2.bias is () and should be (16,)"),
        ("blocks.0.mlp_channels.fc1.weight", (96,), "fc1.weight is (96,) and should be (96, 16)"),
        ("blocks.0.mlp_channels.gate.proj.weight", (31,), "proj.weight is (31,) and should be (16, 16)"),
        ("blocks.0.mlp_channels.gate.proj.bias", (10,), "a square image"),
        ("stem.proj.weight", (768,), "stem.proj.weight is (768,) and should be (16, 3, 4, 4)"),
        ("stem.proj.weight", (16, 3, 8, 2), "stem.proj.weight is (16, 3, 8, 2) and should be (16, 3, 4, 4)"),
        ("blocks.4.norm.weight", (16,), "blocks.3.mlp_channels.fc1.bias is missing"),
        ("blocks.0.mlp_tokens.fc1.weight", (16,), "blocks.0.mlp_tokens.fc1.weight is (16,) and should be absent"),
    ],
)
def test_other_weights_are_refused_by_name(name, shape, found):
    state = TimmGmlp(**SIZES).state_dict()
    state.pop(name, None)
    if shape is not None:
        state[name] = torch.zeros(shape)
    with pytest.raises(TrainedModelError, match=re.escape(found)):
        from_timm(state)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gmlp-dense"])
def test_models_that_timm_lacks_are_refused(kind):
    model = tiny_config(kind, sequence_length=16)
    with pytest.raises(TrainedModelError, match=r"model.gating=multiplicative_split"):
        to_timm(model, dict(our_model(model).named_parameters()), patch_size=4)
