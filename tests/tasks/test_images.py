"""The task of images: its evaluation, a run that stops and goes on, and its recipes' mistakes."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gmlp_scale.data.image_loader import ImageLoader
from gmlp_scale.distributed.world import lone_world
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.tasks.images import Images, ImagesConfig
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.sinks import read_metrics
from gmlp_scale.train.start import load_recipe
from tests.forked import Script
from tests.gloo_ranks import run_ranks
from tests.whole_runs import assert_close, logged, losses
from tests.written_images import write_image_shards

RECIPE = Path(__file__).parents[2] / "configs" / "images" / "gmlp_ti.yaml"
TINY = [
    "name=tiny", "engine.kind=single", "model.num_blocks=2", "model.d_model=12", "model.d_ffn=16",
    "model.sequence_length=9", "model.vocab_size=3", "patch_size=4", "survival_probability=0.8", "data.num_workers=1",
    "augmentation.policy=none", "train.num_steps=6", "train.global_batch_size=8", "train.micro_batch_size=4",
    "train.precision=float32", "train.compile=false", "train.log_every_steps=1", "train.evaluate_every_steps=6",
    "optimizer.warmup_steps=1", "optimizer.peak_learning_rate=0.02",
]  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return write_image_shards(tmp_path_factory.mktemp("images"))


def recipe(shards: Path, *overrides: str) -> ImagesConfig:
    return load_recipe(RECIPE, [*TINY, f"data.shards={shards}", *overrides])


def test_a_run_that_stops_goes_on_as_if_it_had_not(shards, tmp_path):
    pretrain(recipe(shards, f"output_dir={tmp_path / 'whole'}"))
    parts = f"output_dir={tmp_path / 'parts'}"
    pretrain(recipe(shards, parts, "train.stop_after_step=3"))
    pretrain(recipe(shards, parts, "data.num_workers=0"))
    whole, in_parts = (read_metrics(tmp_path / name / "tiny" / "metrics.jsonl") for name in ("whole", "parts"))
    assert len(losses(tmp_path / "whole/tiny")) == 6
    assert losses(tmp_path / "parts/tiny") == losses(tmp_path / "whole/tiny")
    assert in_parts[-1] == whole[-1] and 0 < whole[-1]["eval/accuracy"] <= whole[-1]["eval/top_5_accuracy"] == 1
    assert all(0 <= values["perf/data_wait_fraction"] <= 1 for values in whole if "train/loss" in values)


def _end_process_group_at_step_3() -> None:
    os.setsid()
    undisturbed = ImageLoader.steps

    def steps(loader, start_step, stop_step):
        for number, micro_batches in enumerate(undisturbed(loader, start_step, stop_step), start_step + 1):
            if number == 3:
                subprocess.run(["sh", "-c", f"kill -s TERM -- -{os.getpid()}"])
            yield micro_batches

    ImageLoader.steps = steps


def test_a_stop_signal_to_the_process_group_spares_the_workers(shards, tmp_path):
    words = ["--config", RECIPE, *TINY, f"data.shards={shards}", f"output_dir={tmp_path}", "data.prefetch_batches=1"]
    code, _, errors = Script("launch/pretrain.py", words, prepare=_end_process_group_at_step_3).end()
    assert code == 0, errors
    assert [path.name for path in (tmp_path / "tiny/checkpoints").iterdir()] == ["step_000000003"]


def _train(shards: Path, overrides: list[str]) -> None:
    pretrain(recipe(shards, *overrides))


def test_two_ranks_and_other_micro_batches_have_the_losses_of_one_process(shards, tmp_path):
    names = ("one", "two", "resumed")
    one, two, resumed = ([f"output_dir={tmp_path / name}", "survival_probability=1"] for name in names)
    _train(shards, one)
    run_ranks(_train, 2, shards, [*two, "engine.kind=fsdp2"])
    _train(shards, [*resumed, "train.stop_after_step=3"])
    _train(shards, [*resumed, "train.micro_batch_size=8"])
    one, two, resumed = (logged(tmp_path / name / "tiny") for name in names)
    assert_close(two, one)
    assert_close(resumed, one)


def test_the_label_counts_among_the_likeliest_one_and_five(shards):
    task, world = Images(recipe(shards, "data.num_workers=0", "train.num_evaluation_rows=5")), lone_world()
    loader = task.open_loader(world)
    labels = torch.cat([batch.labels_B[:counted] for batch, counted in loader.heldout_batches(5)])
    probabilities = torch.tensor([0.1, 0.7, 0.2])
    engine = SimpleNamespace(predict=lambda batch: probabilities.log().expand(len(batch.labels_B), 3))
    found = task.evaluate(engine, world, step=1)
    assert found == {
        "eval/loss": pytest.approx(-probabilities.log()[labels].mean().item()),
        "eval/accuracy": (labels == 1).double().mean().item(),
        "eval/top_5_accuracy": 1.0,
    }


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (["model.sequence_length=10", "train.micro_batch_size=1"], "needed: the patches of a square image"),
        (["model.sequence_length=10", "train.micro_batch_size=1"], "needed: an even number, or augmentation.mixup_alp"),
        (["augmentation.policy=mine"], "'autoaugment'"),
        (["data.packing=packed"], "data.packing: unknown field"),
        (["train.micro_batch_size=auto"], "found auto; needed: a number with task=images"),
    ],
)
def test_a_recipe_says_what_is_wrong_with_it(shards, wrong, found):
    with pytest.raises(ConfigError, match=found):
        recipe(shards, *wrong)
