"""Makes the site's page of all recipe fields from the classes of the recipes; mkdocs calls `on_files`.

A field's docstring gives its meaning and, for a number, its unit in brackets at the end: `[steps]`.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gmlp_scale.fields import MOST_COUNT, MOST_NUMBER, Mark, marked_fields
from gmlp_scale.finetune.config import FinetuneConfig
from gmlp_scale.recipe.config import RunConfig
from gmlp_scale.tasks.characters import CharactersConfig
from gmlp_scale.tasks.images import ImagesConfig

RECIPES = {
    "Pretraining": RunConfig,
    "Next characters": CharactersConfig,
    "Images": ImagesConfig,
    "Finetuning": FinetuneConfig,
}
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", NoneType: "null", dict: "mapping"}
LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "items >=", "pattern": "matches"}
INTRODUCTION = """[Recipes](recipes.md#recipes-and-their-fields) are YAML files of sections.
*needed* stands where a field has no default. An integer is at most 10^15, a number at most 10^37, where the table
gives no other limit. A resumed run may change a *free* field, data.shards to where the same data lies. The others
stay as the checkpoint has them, unless `train.allow_changed_on_resume` names them."""
UNIT = re.compile(r"\s*\[([^\[\]]+)\]$")


def on_files(files, config):
    """Adds the page; mkdocs' hook."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "fields.md", content=page()))
    return files


def page() -> str:
    """The page in Markdown: a table for each class, and a class of several recipes only once."""
    lines, shown = ["# Recipe fields", "", INTRODUCTION], set()
    for title, recipe in RECIPES.items():
        free = marked_fields(Mark.FREE_ON_RESUME, recipe)
        lines += ["", f"## {title}"]
        for place, config_class in config_classes(recipe):
            if config_class not in shown:
                shown.add(config_class)
                lines += ["", f"### {place or 'The recipe itself'}", "", inspect.cleandoc(config_class.__doc__ or "")]
                lines += ["", "| field | type | default | unit | resume | meaning |", f"|{' --- |' * 6}"]
                lines += _rows(place, config_class, free)
    return "\n".join(lines) + "\n"


def config_classes(config_class: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(where in the recipe, class) of a class and of all that its fields hold."""
    yield place, config_class
    for name, field in config_class.model_fields.items():
        for section in _sections(field):
            kind = f" of kind {section.model_fields['kind'].default}" if "kind" in section.model_fields else ""
            yield from config_classes(section, f"{place}{'.' if place else ''}{name}{kind}")


def own_fields(config_class: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that have a line in the table of the class; not those that hold sections or null alone."""
    fields = config_class.model_fields.items()
    return {name: field for name, field in fields if not _sections(field) or str in _parts(field.annotation)}


def meanings(config_class: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """The docstring below each field, base classes' fields too, in one line; and the unit at its end, or ""."""
    found = {}
    for one in reversed(config_class.__mro__):
        if issubclass(one, BaseModel) and one is not BaseModel:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                        meaning, *unit = UNIT.split(" ".join(text.split()))
                        found[name] = meaning, "".join(unit)
    return found


def is_number(field: FieldInfo) -> bool:
    return not {int, float}.isdisjoint(_parts(field.annotation))


def _rows(place: str, config_class: type[BaseModel], free: tuple[str, ...]) -> Iterator[str]:
    section = place.partition(" ")[0]
    of_class = meanings(config_class)
    for name, field in own_fields(config_class).items():
        meaning, unit = of_class[name]
        path = f"{section}.{name}" if section else name
        default = "*needed*" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
        resume = "free" if path in free or path.partition(".")[0] in free else ""
        cells = (f"`{path}`", _type(field), default, unit, resume, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _sections(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes that the field's value may have, if it is a section of its own."""
    return [part for part in _parts(field.annotation) if inspect.isclass(part) and issubclass(part, BaseModel)]


def _parts(annotation: Any) -> list[Any]:
    """The classes and literals of an annotation, from the outside in."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    parts = [] if get_origin(annotation) is Literal else [p for a in get_args(annotation) for p in _parts(a)]
    return [annotation, *parts]


def _type(field: FieldInfo) -> str:
    return ", ".join([_words(field.annotation), *_limits(field.metadata)])


def _limits(checks: Iterable[Any]) -> list[str]:
    """The last check of a kind counts: the first are those of all numbers."""
    checks = [part for check in checks for part in getattr(check, "metadata", [check])]
    found = {words: getattr(check, name) for name, words in LIMITS.items() for check in checks if hasattr(check, name)}
    return [f"`{words} {limit}`" for words, limit in found.items() if limit not in (None, MOST_COUNT, MOST_NUMBER)]


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_words(arguments[0]), *_limits(arguments[1:])])
    if origin is Literal:
        return " or ".join(f"`{_yaml(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, arguments))
    if origin is list or (origin is tuple and Ellipsis in arguments):
        return f"list of {_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(map(_words, arguments))}"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "section"
    return TYPES.get(annotation, "path")


def _yaml(value: Any) -> str:
    """A value as a recipe has it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
