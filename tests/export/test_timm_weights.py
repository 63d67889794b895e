"""Weights to and from timm's names. timm imports torchvision, which is not here, so its gMLP is written out below."""

from functools import partial

import pytest
import torch
from torch import nn

from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.export.timm_weights import from_timm, to_timm
from gmlp_scale.models import build_model
from gmlp_scale.models.gmlp import GmlpConfig
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.trained import TrainedModelError, copy_weights

SIZES = {"num_blocks": 3, "d_model": 16, "d_ffn": 96, "sequence_length": 16, "vocab_size": 7}


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

    def __init__(self, num_blocks: int, d_model: int, d_ffn: int, sequence_length: int, vocab_size: int):
        super().__init__()
        self.stem = nn.ModuleDict({"proj": nn.Conv2d(3, d_model, kernel_size=4, stride=4)})
        self.blocks = nn.Sequential(*(TimmBlock(d_model, d_ffn, sequence_length) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, images):
        x = self.stem["proj"](images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def our_model(**changes) -> ImageClassifier:
    config = GmlpConfig(**SIZES, spatial=changes.pop("spatial", "dense"), **changes)
    model = build_model(config, head=partial(ImageClassifier, patch_size=4)).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def test_both_ways_give_the_same_logits():
    torch.manual_seed(0)
    theirs, ours = TimmGmlp(**SIZES), our_model()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    images_B3HW = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    batch, normalised = ImageBatch(images_B3HW, None, None, None), images_B3HW / 127.5 - 1
    copy_weights(ours, from_timm(theirs.state_dict()))
    torch.testing.assert_close(ours.predict(batch), theirs(normalised), atol=1e-4, rtol=1e-4)

    back = our_model()
    back.classifier.weight.data.normal_()
    theirs.load_state_dict(to_timm(dict(back.named_parameters()), patch_size=4))
    torch.testing.assert_close(theirs(normalised), back.predict(batch), atol=1e-4, rtol=1e-4)


def test_other_models_are_refused():
    with pytest.raises(TrainedModelError, match=r"blocks.0.mlp_tokens.fc1.weight"):
        from_timm({"stem.proj.weight": torch.zeros(4, 3, 4, 4), "blocks.0.mlp_tokens.fc1.weight": torch.zeros(1)})
    with pytest.raises(TrainedModelError, match=r"stem.proj.weight"):
        from_timm({"norm.weight": torch.zeros(4)})
    with pytest.raises(TrainedModelError, match="Toeplitz"):
        to_timm(dict(our_model(spatial="toeplitz").named_parameters()), patch_size=4)
