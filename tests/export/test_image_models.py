"""Image classifiers leave a run for transformers and timm, and come back from timm's weights."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from gmlp_scale.checkpoint.saved_run import read_weights
from gmlp_scale.checkpoint.trained import TrainedModelError, copy_weights
from gmlp_scale.data.augmentation import centre_crop
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.export.image_models import from_timm, read_image_run, to_timm
from gmlp_scale.models import build_model
from gmlp_scale.models.gmlp import GmlpConfig
from gmlp_scale.models.image_classifier import ImageClassifier
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.start import load_recipe
from launch import evaluate_images, export_images, plot_model
from tests.models.every_kind import KINDS, tiny_config
from tests.written_images import CLASSES, prepare, write_image_folder

RECIPE = Path(__file__).parents[2] / "configs" / "images" / "mnist.yaml"
SIZES = {"num_blocks": 3, "d_model": 16, "d_ffn": 96, "sequence_length": 16, "vocab_size": 7}
GMLP_S16_224 = {"num_blocks": 30, "d_model": 256, "d_ffn": 1536, "sequence_length": 196, "vocab_size": 1000}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    source = write_image_folder(folder / "photos", size=(50, 40))
    prepare("--input", source, "--heldout-fraction", 0.25, "--output", folder / "shards")
    sizes = [
        "model.num_blocks=2", "model.d_model=12", "model.d_ffn=16", "model.vocab_size=3", "data.num_workers=0",
        "train.num_steps=2", "train.global_batch_size=4", "train.micro_batch_size=4", "optimizer.warmup_steps=1",
    ]  # fmt: skip
    pretrain(load_recipe(RECIPE, [*sizes, f"data.shards={folder / 'shards'}", f"output_dir={folder}"]))
    return folder / "mnist"


def our_logits(run: Path, jpeg: bytes) -> torch.Tensor:
    model = read_image_run(run).build()
    with torch.no_grad():
        return model.predict(ImageBatch(centre_crop(jpeg, model.image_size)[None], None, None, None))


def photo(run: Path) -> Path:
    return run.parent / "photos/bee/0.jpg"


def test_transformers_gives_the_same_logits_and_names(run, launched, tmp_path):
    folder = tmp_path / "export"
    assert launched(export_images.main, "--run", run, "--output", folder)[0] == 0
    expected = our_logits(run, photo(run).read_bytes())
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    inputs = processor(Image.open(photo(run)), return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
        loss = model(**inputs, labels=torch.tensor([1])).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(expected, torch.tensor([1])))
    classify = pipeline("image-classification", model=model, image_processor=processor)
    found = {answer["label"]: answer["score"] for answer in classify(str(photo(run)))}
    assert found == pytest.approx(dict(zip(CLASSES, expected.softmax(-1)[0].tolist(), strict=True)), abs=1e-5)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again/model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()


def test_hidden_states_and_gradient_checkpointing_of_images(run, launched, tmp_path):
    assert launched(export_images.main, "--run", run, "--output", tmp_path / "hf")[0] == 0
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    pixels = torch.rand(2, 3, 28, 28, generator=torch.Generator().manual_seed(0)) * 2 - 1
    output = model(pixels, labels=torch.tensor([0, 2]), output_hidden_states=True, return_dict=True)
    assert [tuple(state.shape) for state in output.hidden_states] == [(2, 49, 12)] * 3
    torch.testing.assert_close(model.model.logits(output.hidden_states[-1]), output.logits)
    torch.testing.assert_close(model.model.blocks[0](output.hidden_states[0], None), output.hidden_states[1])
    assert model(pixels).hidden_states is None
    with pytest.raises(ValueError, match=r"the images are \[3, 20, 28\]; needed: 3 x 28 x 28"):
        model(pixels[:, :, :20])

    num_passes, gradients = [], []
    for block in model.model.blocks:
        block.register_forward_pre_hook(lambda block, inputs: num_passes.append(1))
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model.train()(pixels, labels=torch.tensor([0, 2])).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert len(num_passes) == 2 + 4
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_an_evaluation_is_that_of_the_run(run, launched, tmp_path):
    words = ["--run", run, "--shards", run.parent / "shards", "--workers", 0, "--batch-size", 5]
    assert launched(evaluate_images.main, *words, "--output", tmp_path / "scores.json")[0] == 0
    found, expected = json.loads((tmp_path / "scores.json").read_text()), read_metrics(run / "metrics.jsonl")[-1]
    assert found.pop("images") == 6 and expected.pop("step") == 2
    assert {f"eval/{name}": value for name, value in found.items()} == pytest.approx(expected, rel=1e-5)


def test_shards_of_other_classes_are_refused_by_name(run, launched, tmp_path):
    source = shutil.copytree(run.parent / "photos", tmp_path / "photos")
    (source / "bee").rename(source / "bat")
    prepare("--input", source, "--heldout-fraction", 0.25, "--output", tmp_path / "shards")
    code, _, error = launched(evaluate_images.main, "--run", run, "--shards", tmp_path / "shards", "--workers", 0)
    assert code == 2 and f"class 1 is 'bee' in the run and 'bat' in the shards at {tmp_path / 'shards'}" in error


def test_weights_go_to_timm_and_come_back(run, launched, tmp_path):
    assert launched(export_images.main, "--run", run, "--output-timm", tmp_path / "timm.safetensors")[0] == 0
    state = load_file(tmp_path / "timm.safetensors")
    assert state["stem.proj.weight"].shape == (12, 3, 4, 4)
    assert state["blocks.1.mlp_channels.gate.proj.weight"].shape == (49, 49)
    back = ["--timm", tmp_path / "timm.safetensors", "--output", tmp_path / "export"]
    assert launched(export_images.main, *back)[0] == 0
    back = load_file(tmp_path / "export/model.safetensors")
    weights = read_weights(run)[1]
    assert back.keys() == {f"model.{name}" for name in weights}
    assert all(torch.equal(back[f"model.{name}"], weight) for name, weight in weights.items())


def test_a_picture_of_what_blocks_give_to_patches(run, launched, tmp_path):
    path = tmp_path / "filters.png"
    assert launched(plot_model.main, "image-filters", "--run", run, "--blocks", 0, 1, "--output", path)[0] == 0
    with Image.open(path) as picture:
        assert min(picture.size) > 200 and len(picture.getcolors(10**7)) > 50


def test_mistakes_are_one_clear_message(run, refuses, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/a").touch()
    (tmp_path / "no.safetensors").write_bytes(b"no")
    state = TimmGmlp(**SIZES).state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "part.safetensors")
    for arguments, found in (
        (["--run", tmp_path / "nothing", "--output", tmp_path / "a"], "no run at"),
        (["--run", run, "--output", tmp_path / "full"], "is there already"),
        (["--run", run, "--step", 1, "--output", tmp_path / "a"], "has no checkpoint of step 1"),
        (["--timm", tmp_path / "no.safetensors", "--output", tmp_path / "a"], "is no safetensors file"),
        (["--timm", tmp_path / "part.safetensors", "--output", tmp_path / "a"], "head.weight is missing"),
        (["--run", run, "--output-timm", tmp_path / "no.safetensors"], "is there already"),
        (["--timm", tmp_path / "no.safetensors", "--step", 1, "--output", tmp_path / "a"], "--step needs --run"),
        (["--run", run], "give --output, --output-timm or both"),
    ):
        refuses(found, export_images.main, *arguments)
    assert (tmp_path / "no.safetensors").read_bytes() == b"no"
    assert not (tmp_path / "a").exists()


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
    model = tiny_config(kind)
    with pytest.raises(TrainedModelError, match=r"model.gating=multiplicative_split"):
        to_timm(model, dict(our_model(model).named_parameters()), patch_size=4)
