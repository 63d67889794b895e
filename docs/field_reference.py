"""Makes the site's page of all recipe fields from the classes of the recipes; mkdocs calls `on_files`.

A field's docstring gives its meaning and, for a number, its unit in brackets at the end: `[steps]`.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
UNIT = re.compile(r"\s*\[([^\[\]]+)\]$")


def on_files(files, config):
    """Adds the page; mkdocs' hook."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "fields.md", content=page()))
    return files


def page() -> str:
    """The page in Markdown: a table for each class, and a class of several recipes only once."""
    lines, shown = ["# Recipe fields", "", *_INTRODUCTION.splitlines()], set()
    for title, recipe in RECIPES.items():
        lines += ["", f"## {title}"]
        for place, config_class in config_classes(recipe):
            if config_class in shown:
                continue
            shown.add(config_class)
            lines += ["", f"### {place or 'The recipe itself'}", "", inspect.cleandoc(config_class.__doc__ or ""), ""]
            lines += _table(place, config_class)
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
A recipe is a YAML file of sections. Every field can also be given on the command line as `section.field=value`.
*needed* stands where a field has no default. `--dry-run` prints all fields of a recipe.

A file may begin with `base: NAME`: another recipe beside it, or one of the package's. A path starts at the file's
folder. The recipe then has its base's fields, except those that it gives itself. A section with another `kind` keeps
only the fields that the new kind has. A base has no base."""


def config_classes(config_class: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(where in the recipe, class) of a class and of all that its fields hold."""
    yield place, config_class
    for name, field in config_class.model_fields.items():
        for member in sections(field):
            kind = f" of kind {member.model_fields['kind'].default}" if "kind" in member.model_fields else ""
            yield from config_classes(member, f"{place}{'.' if place else ''}{name}{kind}")


def sections(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes that the field's value may have, if it is a section of its own."""
    return [part for part in _parts(field.annotation) if inspect.isclass(part) and issubclass(part, BaseModel)]


def meanings(config_class: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field, in one line. A field of a base class has that of the base class."""
    found = {}
    for one in reversed(config_class.__mro__):
        if issubclass(one, BaseModel) and one is not BaseModel:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found


def unit(meaning: str) -> str:
    """The unit in brackets at the end of a docstring, or nothing."""
    bracket = UNIT.search(meaning)
    return bracket[1] if bracket else ""


def is_section(field: FieldInfo) -> bool:
    """Whether the field can hold nothing but sections, or null."""
    return bool(sections(field)) and str not in _parts(field.annotation)


def is_number(field: FieldInfo) -> bool:
    return not {int, float}.isdisjoint(_parts(field.annotation))


def _table(place: str, config_class: type[BaseModel]) -> Iterator[str]:
    section = place.partition(" ")[0]
    yield "| field | type | default | unit | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    meaning_of = meanings(config_class)
    for name, field in config_class.model_fields.items():
        if is_section(field):
            continue  # it has a table of its own
        meaning = meaning_of[name]
        cells = (
            f"`{section}{'.' if section else ''}{name}`", _type(field), _default(field), unit(meaning),
            UNIT.sub("", meaning),
        )  # fmt: skip
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _parts(annotation: Any) -> list[Any]:
    """The classes and literals of an annotation, from the outside in."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    parts = [] if get_origin(annotation) is Literal else [p for a in get_args(annotation) for p in _parts(a)]
    return [annotation, *parts]


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0])
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


def _type(field: FieldInfo) -> str:
    limits = [
        f"`{words} {value}`"
        for check in field.metadata
        for name, words in LIMITS.items()
        if (value := getattr(check, name, None)) is not None
    ]
    return ", ".join([_words(field.annotation), *limits])


def _default(field: FieldInfo) -> str:
    return "*needed*" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"


def _yaml(value: Any) -> str:
    """A value as a recipe has it."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case tuple():
            return str(list(value))
        case _:
            return str(value)
