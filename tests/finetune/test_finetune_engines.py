"""Finetuning on two ranks: every engine gives what one process gives, and moves to another one's checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gmlp_scale.distributed.world import World, start_world
from gmlp_scale.finetune.finetuning import Finetuning, finetune, read_inputs
from gmlp_scale.train.run import build_engine_of
from tests.finetune.conftest import sentiment_run
from tests.gloo_ranks import run_ranks
from tests.whole_runs import losses

PLAIN = ("dropout=0.0", "train.num_steps=4", "train.evaluate_every_steps=2", "train.micro_batch_size=2")


def finetune_on_every_engine(tmp_path: Path, export: Path) -> list[dict]:
    """The scores of each engine's run; the last one goes on from ZeRO 1 to FSDP2."""
    engines = [["engine.kind=zero", "engine.stage=3"], ["engine.kind=fsdp2"]]
    contents = []
    with start_world(120, device="cpu", init_group=True) as world:
        for number, engine in enumerate(engines):
            run = sentiment_run(tmp_path, export, *PLAIN, f"name=engine_{number}", *engine)
            contents.append(finetune(run, read_inputs(run), world))
        first = ["engine.kind=zero", "engine.stage=1", "train.stop_after_step=2"]
        for engine in (first, ["engine.kind=fsdp2"]):
            run = sentiment_run(tmp_path, export, *PLAIN, "name=moved", *engine)
            contents.append(finetune(run, read_inputs(run), world))
        assert all(predicts_without_dropout(tmp_path, export, world, kind) for kind in ("zero", "fsdp2"))
    return contents


def predicts_without_dropout(tmp_path: Path, export: Path, world: World, kind: str) -> bool:
    """Whether predicting draws nothing and training still does."""
    run = sentiment_run(tmp_path, export, *PLAIN, "dropout=0.5", f"engine.kind={kind}")
    inputs = read_inputs(run)
    engine = build_engine_of(Finetuning(run, inputs), world, is_new=True)
    batch = inputs.rows["dev"].batch(np.arange(2))
    repeats = torch.equal(engine.predict(batch), engine.predict(batch))
    draws = engine.module(batch).item() != engine.module(batch).item()
    engine.close()
    return repeats and draws


def test_predicting_leaves_dropout_out_and_training_has_it(tmp_path, export, world):
    assert predicts_without_dropout(tmp_path, export, world, "single")


def test_engines_agree(tmp_path, export, world):
    reference = sentiment_run(tmp_path, export, *PLAIN, "name=single")
    expected = finetune(reference, read_inputs(reference), world)["scores"]["dev"]
    zero, fsdp2, stopped, moved = run_ranks(finetune_on_every_engine, 2, tmp_path, export)[0]
    assert stopped is None
    outputs = tmp_path / "outputs"
    for name, content in (("engine_0", zero), ("engine_1", fsdp2), ("moved", moved)):
        assert losses(outputs / name) == pytest.approx(losses(outputs / "single"), rel=1e-5), name
        assert content["scores"]["dev"]["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
        assert content["scores"]["dev"]["accuracy"] == expected["accuracy"]
        predictions = [(outputs / run / "predictions/dev/SST-2.tsv").read_text() for run in ("single", name)]
        assert predictions[0] == predictions[1]


def test_recomputation_draws_the_same_dropout(tmp_path, export, world):
    found = {}
    for recompute in ("none", "selective", "full"):
        fields = (f"name={recompute}", f"train.recompute={recompute}", "dropout=0.5", "train.num_steps=3")
        run = sentiment_run(tmp_path, export, *fields)
        finetune(run, read_inputs(run), world)
        found[recompute] = losses(run.run_dir)
        assert len(found[recompute]) == 3 and found[recompute] == pytest.approx(found["none"], rel=1e-6)
