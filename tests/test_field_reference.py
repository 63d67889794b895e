"""The site's page of recipe fields: each has its meaning, and each number its unit, in the class that defines it."""

from docs.field_reference import RECIPES, config_classes, is_number, meanings, own_fields, page

CLASSES = {config_class for recipe in RECIPES.values() for _, config_class in config_classes(recipe)}
FIELDS = {
    f"{config_class.__name__}.{name}": (field, *meanings(config_class).get(name, ("", "")))
    for config_class in CLASSES
    for name, field in own_fields(config_class).items()
}


def test_every_field_has_a_meaning_and_every_number_a_unit():
    assert len(CLASSES) >= 16 and len(FIELDS) >= 100
    assert not [name for name, (_, meaning, _) in FIELDS.items() if len(meaning) < 10], "write a docstring below these"
    without_unit = [name for name, (field, _, unit) in FIELDS.items() if is_number(field) and not unit]
    assert not without_unit, "end the docstrings of these with their unit in brackets, as [steps] or [no unit]"


def test_the_page_shows_type_default_unit_resume_and_meaning():
    text = page()
    for row in (
        "| `optimizer.warmup_steps` | integer, `>= 0` | `10000` | steps |  | Steps over which ",
        "| `train.num_steps` | integer, `>= 1` | *needed* | steps |  | The length of ",
        "| `train.stop_after_step` | integer, `>= 1` or null | `null` | steps | free | Stop after ",
        "| `train.compile` | `true` or `false` or `reduce-overhead` | `true` |  | free | torch.compile for each",
        "| `optimizer.betas` | list of 2: number, `>= 0`, `< 1`, number, `>= 0`, `< 1` | `[0.9, 0.999]` | fraction | ",
        "| `engine.deepspeed_config` | path or null | `null` |  | free | ",
        "| `data.shards` | text or list of section | *needed* |  | free | Folder that ",
        "| `data.shards.weight` | number, `> 0` | *needed* | no unit |  | The source's share ",
        "| `grid.peak_learning_rate` | list of number, `> 0`, `items >= 1` | *needed* | no unit | free | ",
    ):
        assert f"\n{row}" in text
    assert text.count("\n### checkpoint\n") == 1, "all recipes have the same"
