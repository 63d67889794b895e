"""Recipes that say what differs from their base."""

from pathlib import Path

import fsspec
import pytest

from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_run_config, package_recipes, read_recipe_file

SMOKE = Path(__file__).parents[2] / "configs" / "pretrain" / "smoke.yaml"


def written(folder, name: str, text: str) -> Path:
    (folder / f"{name}.yaml").write_text(text)
    return folder / f"{name}.yaml"


@pytest.fixture
def base(tmp_path) -> Path:
    return written(tmp_path, "whole", SMOKE.read_text())


def mistakes(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_run_config(path, overrides)
    return error.value.mistakes


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
    kept = ["num_blocks", "d_model", "d_ffn", "sequence_length", "vocab_size"]
    assert read_recipe_file(part)["model"].keys() == {"kind", "num_heads", "positions", *kept}
    overrides = [
        "model.kind=transformer",
        "model.num_heads=2",
        "model.positions=relative",
        "engine.kind=zero",
        "engine.stage=2",
    ]
    assert load_run_config(part) == load_run_config(base, overrides)


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
