"""Runs that start from a trained model, of another length or vocabulary too, and branches of a run."""

import logging
import os
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch

from gmlp_scale.checkpoint import format as checkpoint_module
from gmlp_scale.checkpoint.format import CheckpointError
from gmlp_scale.checkpoint.saved_run import read_run
from gmlp_scale.checkpoint.stores import LocalCheckpoints, newest_checkpoint
from gmlp_scale.checkpoint.trained import TrainedModel, TrainedModelError
from gmlp_scale.data.batch import MaskedBatch
from gmlp_scale.data.tokenizer import Tokenizer, train_tokenizer
from gmlp_scale.distributed.world import lone_world
from gmlp_scale.errors import OtherRankError
from gmlp_scale.export.folder import export_checkpoint
from gmlp_scale.models import build_model
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.tasks import pretraining
from gmlp_scale.tasks.pretraining import start_from
from gmlp_scale.train import resolve
from gmlp_scale.train.run import pretrain
from tests.analysis.conftest import RECIPE
from tests.gloo_ranks import run_ranks
from tests.models.every_kind import TINY, perturb, random_batch, tiny_config
from tests.whole_runs import SMOKE, logged, losses
from tests.written_shards import VOCAB_SIZE, add_tokenizer, write_tiny_shards

WORDS = ("time", "year", "people", "way", "day", "woman", "life", "child", "world", "school", "state", "family")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shards"
    write_tiny_shards(folder, [40], [8], sequence_length=32)
    add_tokenizer(folder)
    return folder


def trained_model(kind: str, shards) -> TrainedModel:
    config = tiny_config(kind, vocab_size=VOCAB_SIZE)
    model = build_model(config)
    model.init_weights(torch.Generator().manual_seed(5))
    perturb(model)
    tokenizer = Tokenizer(shards / "tokenizer")
    return TrainedModel(
        "here", config, "masked_language_model", dict(model.named_parameters()), {},
        tokenizer_folder=str(shards / "tokenizer"), tokenizer_sha256=tokenizer.sha256,
    )  # fmt: skip


def started(trained: TrainedModel, shards, **changes):
    fields = {"d_model": 16, "d_ffn": 32, "vocab_size": VOCAB_SIZE} | changes
    run = load_run_config(SMOKE, [f"data.shards={shards}"]).model_copy(
        update={"model": trained.config.model_copy(update=fields)}
    )
    model = build_model(run.model)
    model.init_weights(torch.Generator().manual_seed(0))
    start_from(trained, model, run)
    return model


@pytest.mark.parametrize("length", [12, 7, 20])
@pytest.mark.parametrize(
    "kind",
    [
        "gmlp",
        "gmlp-dense",
        "amlp",
        "bert-absolute",
        "bert-relative",
        "mlp-attention",
        "modern",
        "avey",
        "avey-static",
    ],
)
def test_short_rows_have_the_same_logits_at_any_length(kind, length, shards):
    trained = trained_model(kind, shards)
    model = started(trained, shards, sequence_length=length)
    batch = random_batch(num_positions=TINY["sequence_length"])
    short = MaskedBatch(batch.token_ids_BN[:, :7], torch.tensor([[1, 3, 5]] * 4), batch.labels_BM)
    torch.testing.assert_close(model.predict(short), trained.build().predict(short), rtol=1e-5, atol=1e-6)


def test_what_is_new_in_a_longer_w_is_zero(shards):
    model = started(trained_model("gmlp", shards), shards, sequence_length=20)
    weight, bias = model.blocks[0].gating.weight, model.blocks[0].gating.bias
    assert (weight[:8] == 0).all() and (weight[-8:] == 0).all() and (weight[8:-8] != 0).all()
    assert (bias[12:] == 1).all()

    weight = started(trained_model("avey", shards), shards, sequence_length=20).blocks[0].spatial
    assert (weight[12:] == 0).all() and (weight[:, 12:] == 0).all() and (weight[:12, :12] != 0).all()


def test_another_vocabulary_keeps_the_pieces_that_both_have(shards, tmp_path):
    train_tokenizer(
        [" ".join(np.random.default_rng(i).permutation(WORDS)) for i in range(200)], 300, tmp_path / "tokenizer"
    )
    trained = trained_model("gmlp", shards)
    old, new = Tokenizer(shards / "tokenizer"), Tokenizer(tmp_path / "tokenizer")
    model = started(trained, tmp_path, vocab_size=new.vocab_size)
    both = [id for id in range(261, new.vocab_size) if new.pieces[id] in old.pieces[261:]]
    assert both and len(both) < new.vocab_size - 261
    weights = trained.weights["embedding.weight"]
    for id in both:
        assert torch.equal(model.embedding.weight[id], weights[261 + old.pieces[261:].index(new.pieces[id])])
    assert torch.equal(model.embedding.weight[:261], weights[:261])


def test_a_model_of_other_widths_is_refused_with_every_difference(shards):
    with pytest.raises(ConfigError) as caught:
        started(trained_model("gmlp", shards), shards, d_ffn=64, gating="additive")
    assert "model.d_ffn: found 64; here has 32" in str(caught.value) and "model.gating" in str(caught.value)


@pytest.fixture(scope="module")
def trunk(shards, tmp_path_factory):
    """train(fields) runs the recipe in one folder; `on_each_rank` is called with its overrides on two ranks instead. A
    stable trunk of 6 steps, saved after each second, is there.
    """
    folder = tmp_path_factory.mktemp("runs")
    recipe = [
        *RECIPE, "train.num_steps=6", "train.log_every_steps=1", "optimizer.schedule=stable",
        "optimizer.peak_learning_rate=0.01", "train.global_batch_size=[[0,4],[5,8]]",
        f"data.shards={shards}", f"output_dir={folder}", "checkpoint.keep_last=9",
    ]  # fmt: skip

    def train(*fields: str, on_each_rank: Callable | None = None):
        if on_each_rank:
            fsdp2 = ["engine.kind=fsdp2", "train.micro_batch_size=2"]
            return run_ranks(on_each_rank, 2, [*recipe, *fsdp2, *fields])
        return pretrain(load_run_config(SMOKE, [*recipe, *fields]))

    train("name=trunk")
    return folder, train


def test_a_run_starts_from_an_export_or_a_run(trunk, caplog):
    folder, train = trunk
    export_checkpoint(read_run(folder / "trunk", 4), folder / "trunk", folder / "export")
    logging.getLogger("gmlp_scale").propagate = True
    for name, place in (("from_run", f"{folder / 'trunk'}@4"), ("from_export", folder / "export")):
        train(f"name={name}", f"init_from={place}", "train.stop_after_step=2")
    assert losses(folder / "from_run") == losses(folder / "from_export")
    train("name=random", "train.stop_after_step=2")
    assert losses(folder / "from_run")[1] != losses(folder / "random")[1]
    checkpoint, _ = newest_checkpoint(folder / "from_run" / "checkpoints")
    assert checkpoint.details["config"]["init_from"] == f"{folder / 'trunk'}@4"
    assert read_run(folder / "from_run").step == 2


def _pretrain_while_the_trunk_saves(overrides: list[str]) -> None:
    """As if the trunk saved its last checkpoint after rank 0 looked for the newest one, and before rank 1 does."""

    def names_seen(checkpoints: LocalCheckpoints) -> list[str]:
        is_early = checkpoints.directory.parent.name == "trunk" and os.environ["RANK"] == "0"
        return [name for name in names(checkpoints) if not is_early or name <= "step_000000004"]

    names, LocalCheckpoints.names = LocalCheckpoints.names, names_seen
    pretrain(load_run_config(SMOKE, overrides))


def test_all_ranks_start_from_the_step_that_rank_0_finds_which_is_recorded(trunk):
    folder, train = trunk
    place, run = folder / "trunk", folder / "of_a_run"
    train("name=of_step_4", f"init_from={place}@4")
    for stop in ("2", "null"):  # the resumed run finds a newer checkpoint of the trunk, but keeps its own start
        fields = ["name=of_a_run", f"init_from={place}", f"train.stop_after_step={stop}"]
        train(*fields, on_each_rank=_pretrain_while_the_trunk_saves)
    assert losses(run) == pytest.approx(losses(folder / "of_step_4"), rel=1e-5)
    assert load_run_config(run / "config.yaml").init_from == f"{place}@4"
    assert read_run(run).details["config"]["init_from"] == f"{place}@4"
    export_checkpoint(read_run(run, 6), run, folder / "export_of_it")
    assert "| began with the weights of | trunk@4 |" in (folder / "export_of_it" / "README.md").read_text()
    train("name=branch_of_it", f"init_from={place}", f"branch_from={run}@4")
    assert load_run_config(folder / "branch_of_it" / "config.yaml").init_from == f"{place}@4"
    with pytest.raises(ConfigError, match=r"init_from: the checkpoint was trained with .*trunk@4'; the run says .*@6'"):
        train("name=of_a_run", f"init_from={place}@6")


def test_a_start_that_was_killed_before_its_first_save_takes_the_newest_step_again(trunk):
    """The step that it recorded may be deleted by now."""
    folder, _ = trunk
    run = load_run_config(SMOKE, [f"output_dir={folder}", "name=killed_early", f"init_from={folder / 'trunk'}"])
    (folder / "killed_early").mkdir()
    recorded = run.model_copy(update={"init_from": f"{folder / 'trunk'}@3"})
    (folder / "killed_early" / "config.yaml").write_text(recorded.to_yaml())
    assert resolve.with_decided_start(run, lone_world()).init_from == f"{folder / 'trunk'}@6"


def test_a_schedule_that_ends_before_the_checkpoint_is_refused(trunk):
    """Each start said that the same command resumes, and a Job of Kubernetes began it again without end."""
    _, train = trunk
    fields = ["name=shortened", "train.global_batch_size=4"]
    train(*fields)
    fields += ["train.num_steps=5", "train.allow_changed_on_resume=[train.num_steps]"]
    with pytest.raises(ConfigError, match=r"train\.num_steps: found 5; needed: at least the step of .*step_000000006"):
        train(*fields)


def test_a_run_that_did_not_record_the_step_goes_on(trunk):
    folder, train = trunk
    with pytest.MonkeyPatch.context() as before:
        before.setattr(resolve, "with_decided_start", lambda run, world: run)
        before.setattr(pretraining, "read_start", read_run)
        train("name=old", f"init_from={folder / 'trunk'}", "train.stop_after_step=2")
    assert train("name=old", f"init_from={folder / 'trunk'}").finished


def _branch(overrides: list[str]) -> tuple[list[str], str]:
    """The folders whose files this rank verified, and how it ended."""
    verified, verify = [], checkpoint_module._verify_files
    checkpoint_module._verify_files = lambda path, done: (verified.append(path.name), verify(path, done))
    try:
        pretrain(load_run_config(SMOKE, overrides))
    except (CheckpointError, OtherRankError) as error:
        return verified, type(error).__name__
    return verified, "trained"


def test_rank_0_alone_verifies_a_branch_point_and_reports_its_damage(trunk, tmp_path):
    folder, train = trunk
    trunk_copy = shutil.copytree(folder / "trunk", tmp_path / "trunk")
    fields = ["name=verified", f"branch_from={trunk_copy}@2", "train.stop_after_step=3"]
    found = train(*fields, on_each_rank=_branch)
    assert found == [(["step_000000002"], "trained"), ([], "trained")]
    file = next((trunk_copy / "checkpoints" / "step_000000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = train(*fields, "name=damaged", on_each_rank=_branch)
    assert found == [(["step_000000002"], "CheckpointError"), ([], "OtherRankError")]


def test_a_branch_goes_on_as_its_trunk_and_then_decays(trunk):
    folder, train = trunk
    branch = [f"branch_from={folder / 'trunk'}@2", "optimizer.decay_steps=3", "train.num_steps=7"]
    train("name=whole", *branch)
    whole = losses(folder / "whole")
    assert sorted(whole) == [3, 4, 5, 6, 7]
    assert [whole[step] for step in (3, 4, 5)] == [losses(folder / "trunk")[step] for step in (3, 4, 5)]
    rates = {row["step"]: row["train/learning_rate"] for row in logged(folder / "whole") if "train/loss" in row}
    assert rates[5] == 0.01 > rates[6] > rates[7] > 0
    train("name=short", *branch, "train.num_steps=5")  # before the batch changes
    assert [losses(folder / "short")[step] for step in (3, 4, 5)] != [whole[step] for step in (3, 4, 5)]
    for stop in ("4", "null"):
        train("name=parts", *branch, f"train.stop_after_step={stop}")
    assert losses(folder / "parts") == whole


@pytest.mark.parametrize(
    ("fields", "error", "found"),
    [
        (["branch_from={trunk}"], ConfigError, "needed: RUN@STEP"),
        (["branch_from={trunk}@3"], TrainedModelError, "has no checkpoint of step 3; it has those of 2, 4, 6"),
        (["branch_from={trunk}@6"], ConfigError, "needed: more than the step of"),
        (["branch_from={trunk}@2", "seed=3"], ConfigError, "belongs to another run"),
        (["branch_from={trunk}@2", "model.d_model=8"], ConfigError, "Other parameters cannot be allowed; init_from"),
        (["branch_from={trunk}@2", "optimizer.kind=muon"], ConfigError, "found muon, but .* has the states of adamw"),
        (["branch_from={trunk}@2", "init_from={trunk}"], ConfigError, "give init_from=null, or no branch_from"),
        (["init_from={trunk}/nothing"], TrainedModelError, "no run at"),
        (["init_from={trunk}@2", "model.d_model=8"], ConfigError, "own family and widths"),
    ],
)
def test_a_start_that_cannot_be_is_one_clear_error(fields, error, found, trunk):
    folder, train = trunk
    with pytest.raises(error, match=found):
        train("name=refused", *[field.format(trunk=folder / "trunk") for field in fields])
    assert not (folder / "refused").exists()
