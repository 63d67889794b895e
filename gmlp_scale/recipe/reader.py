"""Reads a recipe file with `a.b=c` overrides, and reports all its mistakes at once.

A recipe file may say only what differs: its field `base` names another recipe file, whose fields it has unless it gives
its own. That file has no base.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gmlp_scale.data.mixture import SourceConfig
from gmlp_scale.engine import EngineConfig, OptimizerConfig
from gmlp_scale.fields import flatten, leaves, what_is_needed
from gmlp_scale.models import ModelConfig
from gmlp_scale.recipe.config import ConfigError, Recipe, RunConfig
from gmlp_scale.storage.files import is_url, read_file, usable

_PACKAGE = Path(__file__).parents[1]
_RECIPES = next(place / "configs" for place in (_PACKAGE, _PACKAGE.parent) if (place / "configs").is_dir())
"""In an installed package they lie in it, in a checkout beside it."""

AnyConfig = TypeVar("AnyConfig", bound=Recipe)


def _kinds(union: Any) -> dict[str, type[BaseModel]]:
    """A discriminated union's classes by their `kind`."""
    members = get_args(get_args(union)[0])
    return {get_args(member.model_fields["kind"].annotation)[0]: member for member in members}


UNIONS: dict[str, dict[str, type[BaseModel]]] = {
    "model": _kinds(ModelConfig),
    "optimizer": _kinds(OptimizerConfig),
    "engine": _kinds(EngineConfig),
}
"""The classes of the sections that come in kinds, by section and kind."""


def load_run_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """`load_config` of a pretraining recipe."""
    return load_config(RunConfig, path, overrides)


def load_config(config_class: type[AnyConfig], path: str | Path, overrides: Iterable[str] = ()) -> AnyConfig:
    """Reads a recipe as `read_recipe_file` does, applies `a.b=c` overrides (values are YAML) and checks everything.

    An override of `engine.kind`, `model.kind` or `optimizer.kind` drops the fields of the file's section that the new
    kind lacks. An override of a field that it lacks is a mistake.

    Raises:
        ConfigError: with every mistake at once.
    """
    content, source = _read_with_base(path)
    if (purpose := purpose_of(content)) != config_class.purpose:
        mistake = f"is a recipe for {purpose}; this command takes recipes for {config_class.purpose}"
        raise ConfigError(source, [mistake])
    mistakes = _apply_overrides(content, list(overrides))
    try:
        run = config_class.model_validate(content)
    except ValidationError as error:
        mistakes += [_word(config_class, mistake) for mistake in error.errors()]
    else:
        mistakes += [*run.mistakes(), *_wrong_exceptions(run)]
    if mistakes:
        raise ConfigError(source, mistakes)
    return run


def read_recipe_file(path: str | Path) -> dict[str, Any]:
    """A recipe's fields, with those of its base, before they are checked.

    `path` may also be a URL, or the bare name of one of the package's recipes, such as gmlp_base.

    Raises:
        ConfigError: a file is not YAML with sections, or the base has a base.
    """
    return _read_with_base(path)[0]


def _read_with_base(path: str | Path) -> tuple[dict[str, Any], str]:
    """The fields as in `read_recipe_file`, and the file or files that messages name."""
    path = _recipe_file(path)
    own = read_yaml(path)
    base = own.pop("base", None)
    if base is None:
        return own, str(path)
    base_path = _base_file(path, base)
    try:
        content = read_yaml(base_path)
    except ConfigError as error:
        raise ConfigError(str(path), [f"base: {base_path} {error.mistakes[0]}"]) from None
    source = f"{path} with its base {base_path}"
    if content.pop("base", None) is not None:
        needed = "name a recipe without a base, or write the fields of both files into one"
        raise ConfigError(source, [f"base: found {base}, which has a base itself; {needed}"])
    if mistakes := _set_fields(content, dict(leaves(own))):
        raise ConfigError(source, mistakes)
    return content, source


def _base_file(path: str | Path, base: Any) -> str | Path:
    """The file that the recipe at `path` names as its base: one beside it, else one of the package's for a bare name.

    A relative path starts at the recipe's folder.
    """
    if not isinstance(base, str) or not base:
        raise ConfigError(str(path), [f"base: found {base!r}; needed: the name of a recipe beside this one, or a path"])
    if is_url(base):
        return base
    is_name = "/" not in base and not Path(base).suffix
    file = f"{base}.yaml" if is_name else base
    if is_url(str(path)):
        return f"{str(path).rpartition('/')[0]}/{file}"
    beside = Path(path).parent / file
    return beside if beside.exists() or not is_name else package_recipes().get(base, beside)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file with fields, before any base. ConfigError if it is none."""
    try:
        content = parse_yaml(read_file(path).decode())
    except OSError as error:
        mistake = f"cannot be read ({error.strerror or error}); give a recipe's file, or a name such as gmlp_base"
        raise ConfigError(str(path), [mistake]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date, or no UTF-8
        raise ConfigError(str(path), [f"is not plain YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(content, dict):
        raise ConfigError(str(path), [f"found {type(content).__name__}; a recipe is a mapping of sections"])
    return content


def package_recipes() -> dict[str, Path]:
    """The files of the recipes that the package comes with, by their names."""
    return {path.stem: path for path in sorted(_RECIPES.glob("*/*.yaml"))}


def _recipe_file(place: str | Path) -> str | Path:
    """The file of one of the package's recipes for a bare name; every other place is left as it is."""
    name = str(place)
    if "/" in name or Path(name).suffix:
        return place
    files = package_recipes()
    if name not in files:
        raise ConfigError(name, [f"is no recipe's name (a file's ends in .yaml){_nearest(name, files)}"])
    return files[name]


def purpose_of(recipe: dict) -> str:
    """The `purpose` of the class that checks the recipe. A recipe of finetuning may leave its task open, with null."""
    if "task" not in recipe:
        return RunConfig.purpose
    match recipe["task"]:
        case "characters" | "images" as task:
            return f"pretraining on {task}"
        case _:
            return "finetuning"


def parse_yaml(text: str) -> Any:
    """The only reader of YAML here. Raises YAMLError, ValueError or RecursionError for what it cannot take."""
    return usable(yaml.load(text, Loader=_StrictLoader))


class _StrictLoader(yaml.SafeLoader):
    """Refuses repeated keys, and aliases, which a recipe does not need and which can expand without bound."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias (*name) {self.peek_event().start_mark}; write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := {key for key, count in counts.items() if count > 1}:
            raise yaml.YAMLError(f"{', '.join(sorted(repeated))} given twice {node.start_mark}")
        return super().construct_mapping(node, deep)


def _apply_overrides(content: dict, overrides: list[str]) -> list[str]:
    mistakes, parsed = [], {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            mistakes.append(f"{override}: an override is written section.field=value")
            continue
        if not text.strip():
            mistakes.append(f"{override}: no value follows the =; give one, or null for none")
            continue
        if name.strip() == "base":
            mistakes.append(f"{override}: only a recipe file has a base; give the fields that differ, or another file")
            continue
        try:
            override.encode()
            parsed[tuple(name.strip().split("."))] = parse_yaml(text)
        except UnicodeEncodeError as error:
            mistakes.append(f"{override[:200]}: the value is no text of UTF-8 ({error.reason}); give other characters")
        except (yaml.YAMLError, ValueError, RecursionError):
            mistakes.append(f"{override[:200]}: the value is not plain YAML; quote it")
    return mistakes + _set_fields(content, parsed)


def _set_fields(content: dict, fields: dict[tuple[str, ...], Any]) -> list[str]:
    """Sets fields by their keys, and returns the mistakes. A section that gets a `kind` loses what that kind lacks."""
    mistakes = []
    for section, classes in UNIONS.items():
        kind = fields.get((section, "kind"))
        if isinstance(kind, str) and kind in classes and isinstance(content.get(section), dict):
            content[section] = {k: v for k, v in content[section].items() if k in classes[kind].model_fields}
    for keys, value in fields.items():
        target = content
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                mistakes.append(f"{'.'.join(keys)}: {key} is a value, not a section")
                break
        else:
            target[keys[-1]] = value
    return mistakes


def _wrong_exceptions(run: AnyConfig) -> Iterable[str]:
    known = {field for field, _ in flatten(run.model_dump(mode="json"))}
    for field in run.train.allow_changed_on_resume:
        if field not in known:
            yield f"train.allow_changed_on_resume: found {field!r}{_nearest(field, known)}"
        elif field == "optimizer.kind":
            yield f"train.allow_changed_on_resume: found {field}; a checkpoint has its own optimizer's states"


def _word(config_class: type[AnyConfig], mistake: Mapping[str, Any]) -> str:
    """One pydantic error as `field: what was found; what is needed`."""
    location = [str(part) for part in mistake["loc"]]
    if location[:2] == ["data", "shards"]:
        del location[2:3]  # pydantic puts "folder" or "list" after the field's name
    fields, kinds = config_class.model_fields, {}
    if len(location) > 1 and location[1] in UNIONS.get(location[0], ()):
        kinds = UNIONS[location[0]]
        fields = kinds[location.pop(1)].model_fields  # pydantic puts the kind after the section's name
    elif len(location) > 1:
        fields = config_class.model_fields[location[0]].annotation.model_fields
    if location[:2] == ["data", "shards"] and len(location) > 3:
        fields = SourceConfig.model_fields
    name = ".".join(location)
    match mistake["type"]:
        case "extra_forbidden":
            if having := [kind for kind, member in kinds.items() if location[-1] in member.model_fields]:
                return f"{name}: unknown field; only with {location[0]}.kind={' or '.join(having)}"
            return f"{name}: unknown field{_meant(config_class, location[-1], fields)}"
        case "missing":
            return f"{name}: missing; give it in the file or as {name}=..."
        case "union_tag_not_found":
            return f"{name}.kind: missing; one of {', '.join(UNIONS[location[0]])}"
        case "union_tag_invalid":
            return f"{name}.kind: found {mistake['ctx']['tag']!r}; one of {', '.join(UNIONS[location[0]])}"
        case "string_pattern_mismatch":  # only the field `name` has a pattern
            needed = "a name, not a path: letters, digits and _, after the first also . and -"
            return f"{name}: found {mistake['input']!r}; needed: {needed}"
        case _:
            return f"{name}: found {mistake['input']!r}; needed: {what_is_needed(mistake['msg'])}"


def _meant(config_class: type[AnyConfig], field: str, known: Iterable[str]) -> str:
    """Which field an unknown one may stand for: the same or nearly the same of another section, or one of its own."""
    others = {}  # the whole names of the recipe's fields by their last parts
    for section, info in config_class.model_fields.items():
        for member in get_args(info.annotation) or [info.annotation]:  # the classes of a section that comes in kinds
            others |= {other: f"{section}.{other}" for other in getattr(member, "model_fields", {})}
    others |= {name: name for name in config_class.model_fields}
    nearest = difflib.get_close_matches(field, others, n=1, cutoff=0.8)
    if nearest and nearest[0] not in known:
        return f"; did you mean {others[nearest[0]]}?"
    return _nearest(field, known)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
