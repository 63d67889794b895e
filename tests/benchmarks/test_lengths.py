"""Texts of several lengths in an export, and in a BERT and a ModernBERT of as many parameters."""

import math
from pathlib import Path

import torch

from benchmarks.lengths import measure_lengths
from gmlp_scale.recipe.reader import load_run_config

SMOKE = Path(__file__).parents[2] / "configs/pretrain/smoke.yaml"


def test_every_length_is_timed_beside_peers_of_as_many_parameters():
    run = load_run_config(SMOKE, ["model.sequence_length=32"])
    with torch.compiler.set_stance("force_eager"):  # to compile the three models would take a minute
        report = measure_lengths(run, torch.device("cpu"), 1)
    assert list(report["seconds"]) == ["16 tokens", "32 tokens"]
    for length, seconds in report["seconds"].items():
        for peer in ("bert", "modernbert", "reads_padding"):
            assert report["costs"][f"{length} over {peer}"] == seconds["export"] / seconds[peer]
        for peer in ("bert compiled", "modernbert compiled"):
            assert report["costs"][f"{length} over {peer}"] == seconds["export compiled"] / seconds[peer]
    parameters = report["parameters"]
    for peer in ("bert", "modernbert"):
        assert math.isclose(parameters["export"], parameters[peer], rel_tol=0.1)
