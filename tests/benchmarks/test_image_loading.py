"""benchmarks/images.py measures both loaders."""

import json
import sys
from pathlib import Path

from benchmarks import images
from gmlp_scale.data import image_loader

RECIPE = Path(__file__).parents[2] / "configs" / "images" / "mnist.yaml"


def test_both_loaders_are_measured_with_the_recipes_workers_and_micro_batches(succeeds, monkeypatch, tmp_path):
    def noting(*arguments, num_workers, **options):
        seen.append(num_workers)
        return made(*arguments, num_workers=num_workers, **options)

    seen, made = [], image_loader.made_ahead
    monkeypatch.setattr(image_loader, "made_ahead", noting)
    words = ["--config", RECIPE, "--images", "256", "--rounds", "1", "--output", tmp_path / "report.json"]
    sizes = ["data.num_workers=2", "train.micro_batch_size=32", "data.shuffle_group_bytes=10_000_000"]
    succeeds(images.main, *words, *sizes)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["command"] == sys.argv[1:] and report["machine"]["threads"]
    found = report["mnist"]
    assert set(seen) == {2} and (found["workers"], found["micro_batch_size"], found["images"]) == (2, 32, 256)
    assert found["shuffle_groups"] > 2
    rates = found["images_per_core_second"]
    assert rates.keys() == {"gmlp_scale", "gmlp_scale_first_epoch", "plain_dataloader"} and min(rates.values()) > 0
    assert found["ratios"]["over_plain_dataloader"] == rates["gmlp_scale"] / rates["plain_dataloader"]


def test_the_images_fill_micro_batches(launched):
    code, _, error = launched(images.main, "--config", RECIPE, "--images", "48")
    assert code == 2 and "--images must be a multiple of train.micro_batch_size=64" in error
