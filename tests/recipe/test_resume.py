"""Which runs go on from which checkpoints."""

from types import SimpleNamespace

import pytest

from gmlp_scale.fields import Mark, marked_fields
from gmlp_scale.recipe.config import ConfigError, RunConfig
from gmlp_scale.recipe.reader import load_run_config
from gmlp_scale.recipe.resume import check_continues, check_unchanged
from gmlp_scale.tasks.pretraining import build_loader
from tests.whole_runs import SMOKE
from tests.written_shards import VOCAB_SIZE, change_manifest, write_tiny_shards

STEP = 6


@pytest.fixture
def continues(tmp_path):
    """continues(old sources, new ones, allowed) -> what refuses a run with the new ones at step 6 of one with the old.

    A source is (name, weight, from_step, until_step) as far as given; a text is a single folder.
    """
    for name, seed in {"a": 0, "b": 1, "c": 2, "moved/b": 1, "moved/other": 3}.items():
        write_tiny_shards(tmp_path / name, [20], [4], sequence_length=32, seed=5 * seed)

    def refusal_of_sources(old, new, allowed: bool = True) -> str:
        before = recipe(old)
        now = recipe(new, *(["train.allow_changed_on_resume=[data.shards]"] if allowed else []))
        return refusal(before, now, fingerprint(before), fingerprint(now))

    def recipe(sources, *overrides):
        fields = ("shards", "weight", "from_step", "until_step")
        if not isinstance(sources, str):
            listed = [dict(zip(fields, (str(tmp_path / of[0]), *of[1:]), strict=False)) for of in sources]
        sizes = ["model.sequence_length=32", f"model.vocab_size={VOCAB_SIZE}"]
        shards = str(tmp_path / sources) if isinstance(sources, str) else listed
        return load_run_config(SMOKE, [*sizes, f"data.shards={shards}", *overrides])

    def fingerprint(run):
        loader = build_loader(run.with_train(micro_batch_size=1), rank=0, world_size=1)
        loader.close()
        return loader.fingerprint()

    return refusal_of_sources


A, B = ("a", 3), ("b", 1)


def refusal(before, now, data_before: dict, data_now: dict, **details) -> str:
    """What refuses the run `now` at step 6 of the run `before`, whose checkpoint has `details`. Empty: it may go on."""
    details = {"config": before.to_json(), "data": data_before} | details
    checkpoint = SimpleNamespace(path="run", step=STEP, details=details, misfit=lambda model: "")
    try:
        check_continues(now, data_now, checkpoint, model=None)
    except ConfigError as error:
        return str(error)
    return ""


def refusal_of(old: list[str], new: list[str], **details) -> str:
    """The same for runs with these overrides."""
    return refusal(load_run_config(SMOKE, old), load_run_config(SMOKE, new), {}, {}, **details)


def test_resume_refuses_what_changes_the_run_and_allows_what_does_not():
    free = marked_fields(Mark.FREE_ON_RESUME, RunConfig)
    before = load_run_config(SMOKE).model_dump(mode="json")
    now = load_run_config(SMOKE, ["seed=9", "train.micro_batch_size=1", "engine.kind=fsdp2"]).model_dump(mode="json")
    assert check_unchanged(before, now, free) == [
        f"seed: the checkpoint was trained with {before['seed']}; the run says 9"
    ]
    assert check_unchanged(before, now, (*free, "seed")) == []


def test_a_field_that_a_checkpoint_is_too_old_to_have_is_its_default():
    run = load_run_config(SMOKE, ["optimizer.peak_learning_rate=1e-3"])
    stored = run.to_json()
    del stored["optimizer"]["schedule"], stored["optimizer"]["kind"]
    stored["engine"] = {"kind": "zero", "deepspeed_config": "gone.json"}
    assert not refusal_of([], ["optimizer.peak_learning_rate=1e-3"], config=stored)
    stored["train"]["a_field_that_is_gone"] = 1
    assert "a_field_that_is_gone" in refusal_of([], ["optimizer.peak_learning_rate=1e-3"], config=stored)


def test_a_run_from_before_masks_padding_goes_on_where_its_rows_hold_none():
    for packing, line in (("packed", ""), ("document", "model.masks_padding: the checkpoint was trained with False")):
        stored = load_run_config(SMOKE, [f"data.packing={packing}"]).to_json()
        del stored["model"]["masks_padding"]
        error = refusal_of([], [f"data.packing={packing}"], config=stored)
        assert (line in error) if line else not error
        assert not refusal_of([], [f"data.packing={packing}", "model.masks_padding=false"], config=stored)


def test_another_optimizer_is_never_allowed():
    error = refusal_of([], ["optimizer.kind=muon"])
    assert "found muon, but run has the states of adamw" in error
    assert "another name=... for a new run; init_from takes" in error and "allow_changed" not in error


def test_batches_may_change_from_the_checkpoint_on_but_not_before():
    old, allowed = "train.global_batch_size=[[0,8],[5,16]]", "train.allow_changed_on_resume=[train.global_batch_size]"
    assert not refusal_of([old], ["train.global_batch_size=[[0,8],[5,16],[6,32]]", allowed])
    error = refusal_of([old], ["train.global_batch_size=32", allowed])
    as_many_rows = "train.global_batch_size=[[0,4],[3,12]]"
    assert "other batches before step 6" in refusal_of(["train.global_batch_size=8"], [as_many_rows, allowed])
    assert "other batches before step 6" in error and "train.global_batch_size='[[0, 8], [5, 16], [6, 32]]'" in error


def test_a_time_budget_may_change_until_it_has_decided():
    budget = ["optimizer.schedule=stable", "optimizer.decay_steps=2", "train.time_budget_seconds=9"]
    changed = [*budget, "train.time_budget_seconds=30", "train.allow_changed_on_resume=[train.time_budget_seconds]"]
    recorded = {"spent_seconds": 3.0, "timed": [48, 3.0], "decided": None}
    assert not refusal_of(budget, changed, time_budget=recorded)
    decided = {"at_step": 5, "num_steps": 9, "decay_steps": 4}
    error = refusal_of(budget, changed, time_budget=recorded | {"decided": decided})
    assert "found 30.0, but with 9.0 the decay began after step 5" in error and "branch_from=RUN@5" in error
    for field in ("train.num_steps", "optimizer.decay_steps"):
        longer = [*budget, f"{field}=12", f"train.allow_changed_on_resume=[{field}]"]
        assert not refusal_of(budget, longer, time_budget=recorded)
        error = refusal_of(budget, longer, time_budget=recorded | {"decided": decided})
        assert f"1 mistake\n  {field}: found 12, but with" in error
    assert not refusal_of(budget, budget, time_budget=recorded | {"decided": decided})


def test_the_same_sources_go_on_wherever_they_lie(continues):
    assert not continues([A, B], [A, B], allowed=False)
    assert not continues([A, B], [A, ("moved/b", 1)], allowed=False)


def test_a_change_is_refused_in_words_that_name_the_source(continues):
    error = continues("a", [("a", 1), ("b", 0.25, STEP)], allowed=False)
    assert "1 mistake" in error and "'train.allow_changed_on_resume=[data.shards]'" in error
    joined = "data sources.b: the checkpoint was trained with None; the run says 'weight 0.25 from step 6 to the end"
    assert joined in error
    assert "data sources.b: the checkpoint was trained with 'weight 1 " in continues([A, B], [A], allowed=False)
    error = continues([A, B], [A, ("b", 2)], allowed=False)
    assert "with 'weight 1 from" in error and "says 'weight 2 from" in error


@pytest.mark.parametrize(
    "old, new",
    [
        ("a", [("a", 1), ("b", 0.25, STEP)]),  # a second source joins
        ([A, B], [A, B, ("c", 2, STEP + 1)]),
        ([A, B], [("a", 6), ("b", 2)]),  # the same shares
        ([A, B], [A, ("b", 1, 0, STEP)]),  # one ends now
        ([A, ("b", 1, 0, 4)], [A, ("b", 1, 0, 4), ("c", 1, 9)]),
        ([A, ("b", 1, 9)], [A, ("c", 7, 8)]),  # one that had not begun is replaced
    ],
)  # fmt: skip
def test_sources_may_join_and_leave_from_the_checkpoint_on(continues, old, new):
    assert not continues(old, new)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("a", [("a", 1), ("b", 0.25, STEP - 1)], "gives step 5 0.8 of a (place 0, manifest"),
        ([A, B], [A, ("b", 2)], "gives step 0 0.6 of a"),
        ([A, B], [A], "gives step 0 1 of a"),
        ([A, B], [B, A], "gives step 0 0.25 of b (place 0"),
        ([A, B], [A, ("b", 1, 0, STEP - 1)], "gives step 5 1 of a"),
        ([A, ("b", 1, 0, 4), ("c", 1)], [A, ("c", 1)], "gives step 0 0.75 of a"),
        ([A, B], [A, ("moved/other", 1)], "of other (place 1"),
    ],
)  # fmt: skip
def test_rows_before_the_checkpoint_stay_as_they_were(continues, old, new, words):
    error = continues(old, new)
    assert words in error and "as before the checkpoint" in error and "from_step of at least 6" in error


def test_another_tokenizer_is_never_allowed(continues, tmp_path):
    for name in "bc":
        change_manifest(tmp_path / name, tokenizer_sha256="1" * 64)
    assert "data tokenizer_sha256: the checkpoint was trained with" in continues("a", [B, ("c", 1, STEP)])
