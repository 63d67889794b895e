"""The recipes of finetuning have the paper's numbers, and all mistakes are found at once."""

import pytest

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config
from gmlp_scale.tasks.table import TASKS
from tests.finetune.conftest import RECIPES


def load(task: str, *overrides: str) -> FinetuneConfig:
    return load_config(FinetuneConfig, RECIPES / f"{task}.yaml", overrides)


def mistakes(task: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(task, *overrides)
    return error.value.mistakes


@pytest.mark.parametrize("task", ["mnli", "sst2", "squad_v1", "squad_v2"])
def test_recipes_are_the_papers(task, tmp_path):
    run = load(task)
    assert run.name == run.task == task
    assert (run.dropout, run.optimizer.weight_decay, run.optimizer.gradient_clipping) == (0.1, 0.01, None)
    assert run.train.global_batch_size == 32
    rows = 88_524
    train, optimizer = run.train_config(rows), run.optimizer_config(rows)
    if task.startswith("squad"):
        assert (run.data.sequence_length, run.data.document_stride) == (512, 128)
        assert (train.num_steps, optimizer.warmup_steps, optimizer.peak_learning_rate) == (8_000, 1_000, 5e-5)
    else:
        assert run.data.sequence_length == 128
        assert run.grid.global_batch_size == [16, 32] and run.grid.peak_learning_rate == [1e-5, 2e-5, 3e-5]
        assert train.num_steps == 13_832 and optimizer.warmup_steps == 1_383  # 5 epochs of 2,766.4 steps
        assert train.evaluate_every_steps == 2_767
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    assert load_config(FinetuneConfig, tmp_path / "config.yaml") == run


def test_glues_recipe_is_berts_and_needs_a_task():
    given = ("task=stsb", "data.train=train.tsv", "data.dev=dev.tsv")
    run = load("glue", *given)
    assert run.train_config(5_749).num_steps == 539 and run.optimizer_config(5_749).warmup_steps == 53  # 3 epochs
    assert run.grid.global_batch_size == [32] and run.grid.peak_learning_rate == [2e-5, 3e-5, 4e-5, 5e-5]
    assert (run.data.sequence_length, run.dropout, run.optimizer.gradient_clipping) == (128, 0.1, 1.0)
    assert [mistake.split(":")[0] for mistake in mistakes("glue")] == ["task", "data.train", "data.dev"]


def test_files_may_be_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    parts = TASKS["mnli"].data_set.splits
    data = load("mnli", *(f"data.{part}=~/{part}" for part in parts)).data
    assert len(parts) == 5 and all(data.source(part) == f"/home/x/{part}" for part in parts)


def test_every_mistake_is_found_at_once():
    found = mistakes(
        "sst2", "train.num_steps=3", "train.micro_batch_size=5", "data.dev_mismatched=x.tsv", "data.document_stride=3",
        "train.allow_changed_on_resume=[optimizer.rate]",
    )  # fmt: skip
    for expected in (
        "train.num_epochs: found 5.0 with train.num_steps = 3; give one of the two",
        "train.micro_batch_size: found 5; must divide train.global_batch_size = 32",
        "grid.global_batch_size: found 16; must be a multiple of train.micro_batch_size = 5",
        "data.dev_mismatched: found x.tsv; sst2 has no such part",
        "data.document_stride: found 3; sst2 has no windows",
        "train.allow_changed_on_resume: found 'optimizer.rate'",
    ):
        assert any(expected in mistake for mistake in found)


def test_recomputation_and_compilation_are_those_of_pretraining():
    assert load("mnli", "train.recompute=selective").train_config(100).recompute == "selective"
    found = mistakes("mnli", "engine.kind=zero", "engine.stage=3", "train.recompute=selective", "train.compile=true")
    expected = ["train.compile: found true", "train.recompute: found selective"]
    assert [mistake.split(";")[0] for mistake in found] == expected


def test_fields_are_checked_and_worded():
    found = mistakes("mnli", "data.trian=x", "grid.peak_learning_rate=[a]", "engine.kind=ddp", "model=null")
    for expected in (
        "data.trian: unknown field; did you mean train?",
        "grid.peak_learning_rate.0: found 'a'",
        "engine.kind: found 'ddp'; one of single, zero, fsdp2",
        "model: found None",
    ):
        assert any(mistake.startswith(expected) for mistake in found)


def test_tagging_s_types_are_its_own():
    assert load("tagging").task_row.class_names[:3] == ("O", "B-LOC", "I-LOC")
    assert mistakes("tagging", "data.entity_types=null") == [
        "data.entity_types: found None; needed: the TYPEs of the files' tags B-TYPE"
    ]
    (found,) = mistakes("tagging", "data.entity_types=[PER, LOC, PER]")
    assert found == "data.entity_types: found PER more than once; needed: each type once"
    (found,) = mistakes("mnli", "data.entity_types=[PER]")
    assert found == "data.entity_types: found ['PER']; needed: null, as only tagging has them"


@pytest.mark.parametrize(("task", "least"), [("sst2", 3), ("mnli", 5), ("tagging", 3)])
def test_a_row_has_room_for_a_token_of_each_text(task, least):
    assert load(task, f"data.sequence_length={least}").data.sequence_length == least
    (found,) = mistakes(task, f"data.sequence_length={least - 1}")
    assert found == f"data.sequence_length: found {least - 1}; needed: at least {least}"


def test_tasks_and_squads_needs():
    assert mistakes("mnli", "task=wnli") == [f"task: found 'wnli'; one of {', '.join(TASKS)}"]
    found = mistakes("squad_v1", "data.document_stride=null", "data.sequence_length=60", "data.test=x.json")
    assert [mistake.split(":")[0] for mistake in found] == ["data.test", "data.document_stride", "data.sequence_length"]
