"""Texts of several lengths in an export and in a BERT of as many parameters."""

import math

import torch

from benchmarks.lengths import measure_lengths
from gmlp_scale.recipe.reader import load_run_config


def test_every_length_is_timed_beside_a_bert_of_as_many_parameters():
    run = load_run_config("configs/pretrain/gmlp_base.yaml", ["model.num_blocks=2", "model.sequence_length=32"])
    report = measure_lengths(run, torch.device("cpu"), 1)
    assert list(report["seconds"]) == ["16 tokens", "32 tokens"]
    for length, seconds in report["seconds"].items():
        for peer in ("bert", "reads_padding"):
            assert report["costs"][f"{length} over {peer}"] == seconds["export"] / seconds[peer]
    parameters = report["parameters"]
    assert parameters["export"] == parameters["reads_padding"]
    assert math.isclose(parameters["export"], parameters["bert"], rel_tol=0.01)
