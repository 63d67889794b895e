"""Image classifiers leave a run for transformers and timm, and come back from timm's weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from gmlp_scale.checkpoint.saved_run import read_weights
from gmlp_scale.data.augmentation import centre_crop
from gmlp_scale.data.batch import ImageBatch
from gmlp_scale.export.image_models import read_image_run
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.start import load_recipe
from launch import evaluate_images, export_images, plot_model
from tests.export.test_timm_weights import SIZES, TimmGmlp
from tests.written_images import CLASSES, prepare, write_image_folder

RECIPE = Path(__file__).parents[2] / "configs" / "images" / "mnist.yaml"


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


def test_mistakes_are_one_clear_message(run, launched, tmp_path):
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
        code, _, error = launched(export_images.main, *arguments)
        assert code == 2 and found in error
    assert (tmp_path / "no.safetensors").read_bytes() == b"no"
    assert not (tmp_path / "a").exists()
