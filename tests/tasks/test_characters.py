"""The task of next characters: its rows, its evaluation, a run that stops and goes on, and what it writes."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gmlp_scale.distributed.world import lone_world
from gmlp_scale.errors import InputError
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config, load_run_config
from gmlp_scale.tasks.characters import Characters, CharactersConfig, Text
from gmlp_scale.tasks.records import DataError
from gmlp_scale.train.run import pretrain
from gmlp_scale.train.start import load_recipe
from tests.gloo_ranks import run_ranks
from tests.whole_runs import assert_close, logged, losses

RECIPES = Path(__file__).parents[2] / "configs" / "characters"
TEXT = "so we beat on, boats against the current, borne back ceaselessly into the past. " * 12
LENGTH = 16
TINY = [
    "model.d_model=12", "model.d_ffn=16", "model.num_blocks=2", f"model.sequence_length={LENGTH}",
    f"model.vocab_size={len(set(TEXT))}", "train.num_steps=6", "train.global_batch_size=8",
    "train.micro_batch_size=2", "train.precision=float32", "train.log_every_steps=1", "train.evaluate_every_steps=6",
    "optimizer.peak_learning_rate=0.01",
]  # fmt: skip
MODELS = {
    "mlp_attention": ["model.num_heads=2", "model.d_scores=6"],
    "transformer": ["model.num_heads=2"],
    "gmlp": [],
    "gmlp_dense": [],
}


@pytest.fixture(scope="module")
def text_path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def recipe(name: str, text_path: Path, *overrides: str) -> CharactersConfig:
    return load_recipe(RECIPES / f"{name}.yaml", [*TINY, *MODELS[name], f"data.text={text_path}", *overrides])


def test_rows_are_crops_of_the_text_and_what_follows_them(text_path):
    text = Text(recipe("gmlp", text_path))
    num_train = int(len(TEXT) * 0.9)
    assert text.train.num_rows == num_train - LENGTH
    starts = [0, 5, num_train - LENGTH - 1]
    batch = text.train.batch(np.array(starts))
    for ids_BN, shift in ((batch.token_ids_BN, 0), (batch.next_ids_BN, 1)):
        spelled = ["".join(text.alphabet[index] for index in row) for row in ids_BN]
        assert spelled == [TEXT[start + shift : start + shift + LENGTH] for start in starts]


def test_every_heldout_crop_counts_once_on_any_number_of_ranks(text_path):
    task = Characters(recipe("gmlp", text_path))
    task.open_loader(lone_world())
    num_crops = len(range(0, task.text.heldout.num_rows, LENGTH))
    assert num_crops == 5  # with micro-batches of 2 on 4 ranks the last rank has none
    frequencies = torch.from_numpy(np.bincount(task.text.heldout.ids, minlength=len(task.text.alphabet))).float()
    engine = SimpleNamespace(predict=lambda batch: frequencies.expand(*batch.next_ids_BN.shape, -1))
    sums = []

    def evaluate(rank: int, size: int) -> None:
        def sum_of_rank(values):
            sums.append(values)
            return values

        facts = {"rank": rank, "size": size, "is_main": rank == 0, "device": torch.device("cpu")}
        alone = {"gather": lambda value: [value], "is_stop_signalled": False}
        try:
            task.evaluate(
                engine,
                SimpleNamespace(**facts, sum=sum_of_rank, **alone),
                0,
            )
        except InputError:  # of the rank without crops
            assert (rank, size) == (3, 4)

    evaluate(0, 1)
    for rank in range(4):
        evaluate(rank, 4)
    assert sums[0] == pytest.approx(np.sum(sums[1:], axis=0))
    assert sums[0][2] == num_crops * LENGTH


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_stops_and_goes_on_is_the_run_that_never_stopped(name, text_path, tmp_path):
    pretrain(recipe(name, text_path, f"output_dir={tmp_path / 'whole'}"))
    for stop in ("3", "null"):
        pretrain(recipe(name, text_path, f"output_dir={tmp_path / 'parts'}", f"train.stop_after_step={stop}"))
    whole = losses(tmp_path / "whole" / name)
    assert len(whole) == 6 and whole[6] < whole[1]
    assert losses(tmp_path / "parts" / name) == whole
    last = logged(tmp_path / "whole" / name)[-1]
    assert last["eval/loss"] == pytest.approx(math.log(last["eval/perplexity"]))


def _train(path: Path, overrides: list[str]) -> None:
    pretrain(recipe("mlp_attention", path, *overrides))


def test_two_ranks_have_the_losses_of_one_process(text_path, tmp_path):
    _train(text_path, [f"output_dir={tmp_path / 'one'}", "dropout=0"])
    run_ranks(_train, 2, text_path, [f"output_dir={tmp_path / 'two'}", "dropout=0", "engine.kind=fsdp2"])
    assert_close(*(logged(tmp_path / name / "mlp_attention") for name in ("two", "one")))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"abc" * 500, "has 3 different characters; needed: as many as model.vocab_size"),
        (b"\xff\xfe", "is not UTF-8"),
        ("".join(sorted(set(TEXT))).encode(), "enough for a crop"),
    ],
)
def test_a_text_that_does_not_fit_is_one_clear_error(content, found, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=found):
        Text(recipe("gmlp", path))


def test_a_recipe_says_what_is_wrong_with_it():
    path = RECIPES / "gmlp.yaml"
    with pytest.raises(ConfigError, match="is a recipe for pretraining on characters"):
        load_run_config(path)
    wrong = ["model.kind=mixer", "model.d_spatial=4", "train.micro_batch_size=auto", "optimizer.decay_steps=9"]
    with pytest.raises(ConfigError, match=r"(?s)needed: one that can be causal.*found auto") as caught:
        load_config(CharactersConfig, path, wrong)
    assert "optimizer.decay_steps" not in str(caught.value)
    with pytest.raises(ConfigError, match="found triton; needed: auto or torch"):
        load_config(CharactersConfig, path, ["model.kernels=triton"])


def test_a_branch_may_read_the_same_text_elsewhere(text_path, tmp_path):
    pretrain(recipe("gmlp", text_path, f"output_dir={tmp_path}", "checkpoint.save_every_steps=2"))
    (tmp_path / "copy.txt").write_text(TEXT)
    branch = ["name=branch", f"branch_from={tmp_path / 'gmlp'}@4", "train.num_steps=5"]
    pretrain(recipe("gmlp", tmp_path / "copy.txt", f"output_dir={tmp_path}", *branch))
    assert losses(tmp_path / "branch") == {5: losses(tmp_path / "gmlp")[5]}
