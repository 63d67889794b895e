"""launch/benchmark_images.py measures both loaders."""

import json
import sys
from pathlib import Path

from launch import benchmark_images

RECIPE = Path(__file__).parents[2] / "configs" / "images" / "mnist.yaml"


def test_both_loaders_are_measured(monkeypatch, capsys):
    words = ["benchmark_images.py", "--config", str(RECIPE), "--images", "48", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark_images.main() == 0
    report = json.loads(capsys.readouterr().out)
    rates = report["images_per_core_second"]
    assert rates.keys() == {"gmlp_scale", "plain_dataloader"} and min(rates.values()) > 0
    assert report["ratios"]["over_plain_dataloader"] == rates["gmlp_scale"] / rates["plain_dataloader"]
