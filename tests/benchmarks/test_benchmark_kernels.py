"""The kernels' benchmark: both forms of a kernel compute the same, and the launcher prints figures of each."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import main, pieces_of
from gmlp_scale.recipe.reader import load_run_config
from tests.forked import Script
from tests.triton_interpreter import run_interpreted

ROOT = Path(__file__).parents[2]
TINY = ["model.sequence_length=12", "model.d_model=16", "model.d_ffn=32", "train.micro_batch_size=2"]


def _outputs_of_pieces(recipe: str, spatial: str) -> dict[str, list[tuple]]:
    """By name, what the fused and the plain form return; of the backward passes also what they fill."""
    overrides = [*TINY, f"model.spatial={spatial}", "train.precision=float32"]
    run = load_run_config(ROOT / f"configs/pretrain/{recipe}.yaml", overrides)
    torch.manual_seed(0)
    outputs = {}
    for name, piece in pieces_of(run, torch.device("cpu")).items():
        outputs[name] = []
        for form in (piece.fused, piece.plain):
            inputs, filled = piece.inputs, ()
            if name.endswith("backward"):
                filled = (torch.zeros_like(inputs[-1]),)
                inputs = (*inputs[:-1], *filled)
            returned = form(*inputs)
            outputs[name].append((*(returned if isinstance(returned, tuple) else (returned,)), *filled))
    return outputs


@pytest.mark.parametrize("recipe, spatial", [("gmlp_base", "dense"), ("amlp_base", "toeplitz")])
def test_both_forms_of_a_kernel_compute_the_same(recipe, spatial):
    outputs = run_interpreted(_outputs_of_pieces, recipe, spatial)[0]
    assert len(outputs) == 5
    for fused, plain in outputs.values():
        torch.testing.assert_close(fused[: len(plain)], plain, rtol=1e-4, atol=1e-5)  # the norm's kernel gives more


OPTIONS = ["--config", str(ROOT / "configs/pretrain/gmlp_base.yaml"), "--rounds", "1", "--device"]


def test_launcher_prints_figures_of_every_kernel():
    script = Script("benchmarks/kernels.py", [*OPTIONS, "cpu"], environment={"TRITON_INTERPRET": "1"})
    code, printed, errors = script.end()
    assert code == 0, errors
    report = json.loads(printed)
    assert len(report["kernels"]) == 5
    for figures in report["kernels"].values():
        assert figures["seconds"].keys() == {"fused", "plain", "compiled", "floor"}
        fraction = figures["seconds"]["floor"] / figures["seconds"]["fused"]
        assert figures["fraction_of_floor"] == pytest.approx(fraction)


def test_launcher_prints_what_launches_take_where_there_is_no_gpu(succeeds):
    report = json.loads(succeeds(main, *OPTIONS, "none"))
    assert 0 < report["host_seconds"]["forward"] < 1 and 0 < report["host_seconds"]["backward"] < 1
    tiles = [found for found in report["compiled_for_sm_90"] if found["kernel"] == "spatial_gate"]
    assert len(tiles) == 4 and tiles[0]["tile"]["BLOCK_G"] == 64
    assert all(found["registers"] and found["programs_per_multiprocessor"] for found in report["compiled_for_sm_90"])
    assert all(0 < found["loop_instructions"] < found["instructions"] for found in tiles)
    assert all(found["masked_lanes"] == 0 and 0 < found["instructions_per_element"] < 100 for found in tiles)


@pytest.mark.parametrize(
    "words, message",
    [(["cpu"], "--device cpu needs TRITON_INTERPRET=1"), (["none", "--rounds", "0"], "--rounds: found 0")],
)
def test_launcher_refuses_what_it_cannot_time(words, message, launched):
    code, _, error = launched(main, *OPTIONS, *words)
    assert code == 2 and message in error
