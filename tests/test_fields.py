"""Numbers in recipes: every field of every class has finite bounds, in a recipe's file and on its command line."""

import pytest

from docs.field_reference import RECIPES, _parts, config_classes, is_number, own_fields
from gmlp_scale.recipe.config import ConfigError
from gmlp_scale.recipe.reader import load_config

FILES = {"Pretraining": "smoke", "Next characters": "gmlp", "Images": "gmlp_ti", "Finetuning": "sst2"}
NO_NUMBERS = (".nan", ".inf", "-.inf", "-1", "true", "1e300", str(10**43), "9" * 5000)
OTHER_FORMS = {
    "optimizer.betas": ("[{}, 0.999]", "[0.9, {}]"),
    "train.profile_steps": ("[{}, 9]", "[1, {}]"),
    "augmentation.crop_scale": ("[{}, 1.0]", "[0.1, {}]"),
    "grid.global_batch_size": ("[{}]",),
    "grid.peak_learning_rate": ("[{}]",),
    "train.global_batch_size": ("{}", "[[0, 8], [5, {}]]", "[[0, 8], [{}, 4]]"),
    "data.masked_fraction": ("{}", "[[0, 0.2], [5, {}]]", "[[0, 0.2], [{}, 0.1]]"),
}
"""How a field is written that is not a single number."""


def numbers() -> list:
    """(recipe's title, kind of its section, field, whether it is an integer) of each numeric field."""
    found = {}
    for title, recipe in RECIPES.items():
        for place, config_class in config_classes(recipe):
            section, _, kind = place.partition(" of kind ")
            for name, field in own_fields(config_class).items():
                if is_number(field):
                    path = f"{section}.{name}".lstrip(".")
                    found.setdefault((kind, path, config_class), (title, float not in _parts(field.annotation)))
    return [pytest.param(t, kind, path, i, id=f"{t}: {path} {kind}") for (kind, path, _), (t, i) in found.items()]


def mistakes(title: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(RECIPES[title], FILES[title], overrides)
    return error.value.mistakes


@pytest.mark.parametrize("title, kind, path, is_integer", numbers())
def test_a_number_without_bounds_is_a_mistake_in_the_recipe(title, kind, path, is_integer):
    section = path.partition(".")[0]
    of_kind = [f"{section}.kind={kind}"] if kind else []
    for form in OTHER_FORMS.get(path, ("{}",)):
        for value in (*NO_NUMBERS, *([str(2**62), "0.5"] if is_integer else ["1e38"])):
            written = form.format(value)
            if path.startswith("data.shards."):
                field, name = path.rpartition(".")[2], "data.shards"
                written = f"[{{shards: a, {'' if field == 'weight' else 'weight: 1, '}{field}: {written}}}]"
            else:
                name = path
            found = mistakes(title, *of_kind, f"{name}={written}")
            assert any(mistake.startswith(name) for mistake in found), (written, found)
