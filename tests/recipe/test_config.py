"""RunConfig: a recipe with its base and overrides in, one checked object or every mistake at once out."""

import tempfile
from pathlib import Path

import fsspec
import pytest
import yaml

from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config, load_run_config, package_recipes, read_recipe_file
from tests.whole_runs import SMOKE


def mistakes(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_run_config(path, overrides)
    return error.value.mistakes


def test_written_config_reads_back_as_the_same_run(tmp_path):
    run = load_run_config(SMOKE, ["seed=3", "optimizer.peak_learning_rate=1e-3"])
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    assert load_run_config(tmp_path / "config.yaml") == run
    assert run.seed == 3 and run.optimizer.peak_learning_rate == 1e-3


def test_a_recipe_of_the_package_is_found_by_its_name():
    assert load_run_config("smoke") == load_run_config(SMOKE)
    assert load_config(FinetuneConfig, "sst2").task == "sst2"
    assert mistakes("gmlp_bse") == ["is no recipe's name (a file's ends in .yaml); did you mean gmlp_base?"]
    assert "cannot be read" in mistakes("smoke.yaml")[0] and "cannot be read" in mistakes("./smoke")[0]


def test_every_mistake_is_reported_at_once():
    overrides = (
        "train.num_stepz=3 model.d_model=many optimiser.weight_decay=0 train.precision=fp16 seed data.shards=null"
    )
    found = mistakes(SMOKE, *overrides.split())
    assert len(found) == 6
    for needle in (
        "train.num_stepz: unknown field; did you mean num_steps?",
        "model.d_model: found 'many'",
        "optimiser: unknown field; did you mean optimizer?",
        "train.precision: found 'fp16'; needed: 'auto', 'float32' or 'bf16'",
        "seed: an override is written section.field=value",
        "data.shards",
    ):
        assert any(needle in mistake for mistake in found), needle


def test_missing_field_is_named(tmp_path):
    content = yaml.safe_load(SMOKE.read_text())
    del content["train"]["num_steps"], content["model"]["kind"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    text = "\n".join(mistakes(tmp_path / "c.yaml"))
    assert "train.num_steps: missing" in text
    assert "model.kind: missing; one of gmlp, amlp, transformer, mixer" in text


@pytest.mark.parametrize(
    "overrides, needle",
    [
        ("train.profile_steps=[3,2]", "train.profile_steps: found [3, 2]; needed: [FIRST, LAST] in their order"),
        ("train.profile_steps=[3,21]", "train.profile_steps: found [3, 21]; needed: [FIRST, LAST]"),
        ("train.tracker=mlflow", "train.tracker: found 'mlflow'; needed: 'wandb' or 'trackio'"),
        ("model.kind=mixer model.d_spatial=8 train.log_filters=true", "train.log_filters: found true with"),
        ("train.micro_batch_size=3 train.global_batch_size=8", "train.micro_batch_size: found 3; must divide"),
        ("optimizer.warmup_steps=1000000", "optimizer.warmup_steps: found 1000000; must be below train.num_steps"),
        ("train.stop_after_step=1000000", "train.stop_after_step: found 1000000; must be at most"),
        ("train.allow_changed_on_resume=[optimizer.peak_learning_rat]", "did you mean optimizer.peak_learning_rate?"),
        (
            "train.allow_changed_on_resume=[optimizer.kind]",
            "found optimizer.kind; a checkpoint has its own opt",
        ),
        ("engine.kind=zero engine.stage=3 train.recompute=selective", "train.recompute: found selective"),
        ("train.compile=reduce-overhead", "train.compile: found reduce-overhead; needed: true or false, or a GPU"),
        ("engine.kind=zero engine.stage=3 train.compile=reduce-overhead", "found reduce-overhead; needed: false"),
        ("train.compile=often", "train.compile: found 'often'; needed: True, False or 'reduce-overhead'"),
        ("train.global_batch_size=0", "train.global_batch_size: found 0; needed: a positive integer, or a list of at"),
        ("train.global_batch_size=[[0,8]]", "found [[0, 8]]; needed: a positive integer, or a list of at least two"),
        ("train.global_batch_size=[[1,8],[5,4]]", "found [[1, 8], [5, 4]]; needed"),
        ("train.global_batch_size=[[0,8],[9,4],[5,8]]", "train.global_batch_size: found [[0, 8], [9, 4], [5, 8]]"),
        ("train.global_batch_size=[[0,8],[20,4]]", "a change at step 20; needed: changes below train.num_steps = 20"),
        ("train.global_batch_size=[[0,8],[5,6]]", "found 4; must divide train.global_batch_size = 8, then 6 from"),
        (
            "train.time_budget_seconds=60 optimizer.schedule=stable optimizer.decay_steps=19",
            "with optimizer.decay_steps = 19; needed: optimizer.decay_steps of at most train.num_steps - 2",
        ),
        ("train.time_budget_seconds=60", "train.time_budget_seconds: found 60; needed: null, or optimizer.schedule="),
        ("data.masked_fraction=1.5", "data.masked_fraction: found 1.5; needed: a number between 0 and 1, or a list"),
        ("data.masked_fraction=[[0,0.2],[5,0]]", "data.masked_fraction: found [[0, 0.2], [5, 0]]; needed"),
        ("data.masked_fraction=[[0,0.2],[20,0.1]]", "data.masked_fraction: found a change at step 20"),
        ("num_steps=5", "num_steps: unknown field; did you mean train.num_steps?"),
        ("optimizer.num_step=5", "optimizer.num_step: unknown field; did you mean train.num_steps?"),
        ("train.seed=5", "train.seed: unknown field; did you mean seed?"),
        ("engine.kind=single engine.stage=1", "engine.stage: unknown field; only with engine.kind=zero"),
        ("model.num_heads=2", "model.num_heads: unknown field; only with model.kind=transformer or mlp_attention"),
        ("optimizer.kind=sgd", "optimizer.kind: found 'sgd'; one of adamw, muon"),
        ("optimizer.momentum=0.9", "optimizer.momentum: unknown field; only with optimizer.kind=muon"),
        ("optimizer.kind=muon optimizer.momentum=1", "optimizer.momentum: found 1; needed: less than 1"),
        ("engine.kind=ddp", "engine.kind: found 'ddp'; one of single, zero, fsdp2"),
        ("engine.kind=[zero]", """engine.kind: found "['zero']"; one of single, zero, fsdp2"""),
        ("name=../elsewhere", "name: found '../elsewhere'; needed: a name, not a path: letters"),
        ("checkpoint.keep_every_steps=25", "found 25; must be a multiple of checkpoint.save_every_steps = 10"),
        ("model.num_blocks=1000000000", "model.num_blocks: found 1000000000; needed: less than or equal to 10000"),
        ("train.num_steps=", "train.num_steps=: no value follows the =; give one, or null for none"),
        ("seed=" + "[" * 10**5, "[[[: the value is not plain YAML"),
        ("name=2026-31-12", "name=2026-31-12: the value is not plain YAML; quote it"),  # YAML reads a date
        ("name=a\udcff", "name=a\udcff: the value is no text of UTF-8 (surrogates not allowed); give other"),
        ('data.shards="/a\\ud83d"', "the value is no text of UTF-8 (surrogates not allowed)"),
        ('output_dir="/a/\\ud83d\\ude00"', "the value is no text of UTF-8"),  # as JSON writes an emoji
        ('train.allow_changed_on_resume=["\\ud83d"]', "the value is no text of UTF-8"),
    ],
)
def test_settings_that_cannot_work(overrides, needle):
    found = mistakes(SMOKE, *overrides.split())
    assert any(needle in mistake for mistake in found), found


def test_a_branch_may_end_before_what_its_trunk_changes_later():
    changes = [
        "train.global_batch_size=[[0,8],[15,16]]", "data.masked_fraction=[[0,0.3],[16,0.15]]",
        "data.shards=[{shards: a, weight: 2},{shards: b, weight: 1, from_step: 17},"
        "{shards: c, weight: 1, until_step: 18}]",
    ]  # fmt: skip
    load_run_config(SMOKE, changes)
    assert len(mistakes(SMOKE, *changes, "train.num_steps=12")) == 4
    load_run_config(SMOKE, [*changes, "train.num_steps=12", "branch_from=outputs/smoke@10"])
    crammed = ["train.num_steps=10000", "optimizer.decay_steps=2000", "train.time_budget_seconds=null"]
    load_run_config("crammed_gmlp", [*crammed, "branch_from=outputs/crammed_gmlp@8000"])


@pytest.mark.parametrize("other", ["train.precision=float32", "engine.reshard_after_forward=true", "train.device=cpu"])
def test_cuda_graphs_are_for_a_gpu_bf16_and_parameters_that_stay(other):
    fits = ["train.compile=reduce-overhead", "train.device=auto", "train.precision=bf16", "engine.kind=fsdp2"]
    assert load_run_config(SMOKE, fits).train.compile == "reduce-overhead"
    (mistake,) = mistakes(SMOKE, *fits, other)
    assert mistake.startswith("train.compile: found reduce-overhead")


def test_another_engine_kind_leaves_the_files_own_fields_behind(tmp_path):
    content = yaml.safe_load(SMOKE.read_text())
    content["engine"] = {"kind": "zero", "stage": 2}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    assert load_run_config(tmp_path / "c.yaml").engine.stage == 2
    assert load_run_config(tmp_path / "c.yaml", ["engine.kind=single"]).engine.kind == "single"


@pytest.mark.parametrize(
    "text, needle",
    [
        ("a: &x [1]\nb: *x\n", "alias"),
        ("seed: 1\nseed: 2\n", "seed given twice"),
        ("seed: !!python/object/apply:os.getcwd []\n", "is not plain YAML"),
        ("- 1\n", "a recipe is a mapping"),
        ("seed: [", "is not plain YAML"),
        ("name: 2026-31-12\n", "is not plain YAML: month must be in 1..12"),
        ('output_dir: "/a\\ud83d"\n', "is not plain YAML: 'utf-8' codec can't encode character '\\ud83d'"),
        ('"\\ud83d": 1\n', "is not plain YAML: 'utf-8' codec can't encode"),
        ("seed: " + "[" * 10**5 + "]" * 10**5, "is not plain YAML: maximum recursion depth"),
    ],
)
def test_yaml_that_is_not_plain_is_refused(tmp_path, text, needle, trials):
    (tmp_path / "c.yaml").write_text(text)
    assert needle in mistakes(tmp_path / "c.yaml")[0]
    trials("YAML and JSON: tags, aliases, deep nesting; num_blocks of 1e9", 1)


def test_absent_file_is_one_clear_error(tmp_path):
    assert "cannot be read" in mistakes(tmp_path / "absent.yaml")[0]


@pytest.mark.parametrize(
    "place", ["s4://bucket/runs", "s3:/bucket/runs", "file:///runs", "https://host/x", "s3://", "s3://b?x=y", "pipe:ls"]
)
def test_a_url_that_is_of_no_store_is_a_mistake(place):
    """It made a local folder named s3: and a run there."""
    (mistake,) = mistakes(SMOKE, f"output_dir={place}")
    found = f"found a URL that begins with {place.partition(':')[0]}:"
    assert mistake.startswith(f"output_dir: {found}; needed: a path, or one of s3://BUCKET/FOLDER")


def test_a_run_folder_is_a_path_or_a_url():
    assert load_run_config(SMOKE, ["output_dir=./a//b/"]).run_folder == "a/b/smoke"
    run = load_run_config(SMOKE, ["output_dir=memory://a/b/"])
    assert run.run_folder == "memory://a/b/smoke" and run.run_dir.is_relative_to(tempfile.gettempdir())
    assert run.run_dir != load_run_config(SMOKE, ["output_dir=memory://a/c"]).run_dir


def test_a_recipe_of_the_other_kind_is_named_as_one():
    finetuning = SMOKE.parents[1] / "finetune" / "sst2.yaml"
    taken = "this command takes recipes for pretraining on text"
    assert mistakes(finetuning) == [f"is a recipe for finetuning; {taken}"]
    characters = SMOKE.parents[1] / "characters" / "gmlp.yaml"
    assert mistakes(characters) == [f"is a recipe for pretraining on characters; {taken}"]
    for_text = r"1 mistake\n  is a recipe for pretraining on text; this command takes recipes for finetun"
    with pytest.raises(ConfigError, match=for_text):
        load_config(FinetuneConfig, SMOKE)


def test_global_batch_must_cut_evenly_over_the_ranks():
    run = load_run_config(SMOKE, ["engine.kind=fsdp2"])
    assert run.rows_per_rank(2).last * 2 == run.train.global_batch_size
    with pytest.raises(ConfigError, match=r"7 ranks x micro_batch_size must divide .* = 8: no size fits 7 ranks"):
        run.rows_per_rank(7)
    grows = load_run_config(SMOKE, ["train.global_batch_size=[[0,96],[5,256]]", "train.micro_batch_size=32"])
    with pytest.raises(ConfigError, match="= 96, then 256 from step 5: at most 4"):
        grows.model_copy(update={"engine": run.engine}).rows_per_rank(8)
    with pytest.raises(ConfigError, match="found single with 2 ranks"):
        load_run_config(SMOKE).rows_per_rank(2)


def written(folder, name: str, text: str) -> Path:
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


@pytest.fixture
def base(tmp_path) -> Path:
    return written(tmp_path, "whole", SMOKE.read_text())


@pytest.mark.parametrize("place", ["whole", "whole.yaml", "./whole.yaml", "../{folder}/whole.yaml", "{path}"])
def test_a_recipe_has_its_bases_fields_except_its_own(base, place):
    place = place.format(folder=base.parent.name, path=base)
    text = f"base: {place}\nname: part\nseed: 3\nmodel:\n  num_blocks: 1\noptimizer:\n  betas: [0.8, 0.9]\n"
    run = load_run_config(written(base.parent, "part", text), ["model.d_ffn=128"])
    same = ["name=part", "seed=3", "model.num_blocks=1", "optimizer.betas=[0.8,0.9]", "model.d_ffn=128"]
    assert run == load_run_config(base, same)


def test_a_bare_name_is_a_recipe_of_the_package_where_there_is_none_beside(tmp_path, base):
    own = written(tmp_path, "own", "base: gmlp_base\nname: own\n")
    assert load_run_config(own).model == load_run_config("gmlp_base").model
    written(tmp_path, "gmlp_base", SMOKE.read_text())
    assert load_run_config(own).model == load_run_config(SMOKE).model


def test_a_recipe_at_a_url_has_its_base_beside_it(base):
    memory = fsspec.filesystem("memory")
    memory.pipe("/recipes/whole.yaml", base.read_bytes())
    memory.pipe("/recipes/part.yaml", b"base: whole\nname: part\n")
    memory.pipe("/other/part.yaml", b"base: memory://recipes/whole.yaml\nname: part\n")
    for place in ("memory://recipes/part.yaml", "memory://other/part.yaml"):
        assert load_run_config(place) == load_run_config(SMOKE, ["name=part"])


def test_a_section_of_another_kind_loses_what_the_kind_lacks(base):
    model = "model:\n  kind: transformer\n  num_heads: 2\n  positions: relative\n"
    text = f"base: whole\n{model}engine:\n  kind: zero\n  stage: 2\n"
    part = written(base.parent, "part", text)
    kept = ["masks_padding", "num_blocks", "d_model", "d_ffn", "sequence_length", "vocab_size"]
    assert read_recipe_file(part)["model"].keys() == {"kind", "num_heads", "positions", *kept}
    overrides = "model.kind=transformer model.num_heads=2 model.positions=relative engine.kind=zero engine.stage=2"
    assert load_run_config(part) == load_run_config(base, overrides.split())


def test_a_base_has_no_base(base):
    written(base.parent, "part", "base: whole\nname: part\n")
    third = written(base.parent, "third", "base: part\nname: third\n")
    with pytest.raises(ConfigError) as error:
        load_run_config(third)
    needed = "name a recipe without a base, or write the fields of both files into one"
    assert error.value.mistakes == [f"base: found part, which has a base itself; {needed}"]
    assert str(error.value).startswith(f"{third} with its base {base.parent / 'part.yaml'}: 1 mistake")


def test_mistakes_name_both_files(base):
    base.write_text(base.read_text().replace("num_steps", "num_stepz"))
    part = written(base.parent, "part", "base: whole\nname: part\nmodel:\n  d_model: many\n")
    with pytest.raises(ConfigError) as error:
        load_run_config(part)
    assert str(error.value).startswith(f"{part} with its base {base}: 3 mistakes")
    assert "train.num_stepz: unknown field; did you mean num_steps?" in error.value.mistakes


@pytest.mark.parametrize(
    "text, needle",
    [
        ("base: hole\nname: part\n", "hole.yaml cannot be read (No such file or directory); give a recipe's file"),
        ("base: [whole]\nname: part\n", "base: found ['whole']; needed: the name of a recipe beside this one, or a"),
        ("base: whole\nbase: whole\n", "is not plain YAML: base given twice"),
        ("base: whole\nseed:\n  first: 3\n", "seed.first: seed is a value, not a section"),
        ("base: whole\ntrain: null\n", "train: found None; needed: a valid dictionary"),
        ("base: whole\ntrain.num_steps: 3\n", "train.num_steps: unknown field"),
    ],
)
def test_bases_that_cannot_work(base, text, needle):
    (mistake,) = mistakes(written(base.parent, "part", text))
    assert needle in mistake


def test_an_override_names_no_base(base):
    (mistake,) = mistakes(base, "base=gmlp_base")
    assert mistake.startswith("base=gmlp_base: only a recipe file has a base; give the fields that differ")


def test_a_written_config_needs_no_base(tmp_path):
    run = load_run_config("table4_gmlp_18")
    assert "base" not in run.to_json()
    assert load_run_config(written(tmp_path, "config", run.to_yaml())) == run
    assert "base: table3_gmlp_split\n" in package_recipes()["table4_gmlp_18"].read_text()
