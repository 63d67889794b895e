"""What a recipe's field may hold, and what may become of it after the first start, said in the field's annotation.

`steps: FreeOnResume[Count] = 5` is a field `steps`, a number from 1 on, that a resumed run may change. All others stay
as the checkpoint has them, unless `train.allow_changed_on_resume` names them.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, Field

T = TypeVar("T")


class Mark(Enum):
    FREE_ON_RESUME = 1
    FREE_IN_BRANCH = 2
    OF_ONE_MACHINE = 3


FreeOnResume = Annotated[T, Mark.FREE_ON_RESUME]
"""A resumed run may change it: neither the rows nor the mathematics of a step depend on it."""
FreeInBranch = Annotated[T, Mark.FREE_IN_BRANCH]
"""A branch may change it, but a resumed run may not."""
OfOneMachine = Annotated[T, Mark.FREE_ON_RESUME, Mark.OF_ONE_MACHINE]
"""A resumed run may change it, and it means nothing on another machine. It has a default."""

MOST_COUNT, MOST_NUMBER = 10**15, 1e37
"""Every number of a recipe has an end: float32 holds no more than 3.4e38, and int64 is not to overflow."""


def _number(value: Any) -> Any:
    """YAML's true would count as 1."""
    if isinstance(value, bool):
        raise ValueError("a number")
    return value


_Integer = Annotated[int, BeforeValidator(_number), Field(le=MOST_COUNT)]
_Real = Annotated[float, BeforeValidator(_number), Field(le=MOST_NUMBER, allow_inf_nan=False)]
Count = Annotated[_Integer, Field(ge=1)]
CountFrom0 = Annotated[_Integer, Field(ge=0)]
Positive = Annotated[_Real, Field(gt=0)]
NotNegative = Annotated[_Real, Field(ge=0)]
Share = Annotated[_Real, Field(ge=0, lt=1)]
Timeout = Annotated[_Real, Field(gt=0, le=1e6)]
"""In seconds; 1e6 are eleven days. What waits counts nanoseconds or milliseconds in 64 or 32 bits."""


def what_is_needed(message: str) -> str:
    """What a field takes, by pydantic's message."""
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


@cache
def marked_fields(mark: Mark, config_class: type[BaseModel]) -> tuple[str, ...]:
    """The fields with this mark, in a recipe's class or a section's. A marked section stands for all of its fields."""
    found = []
    for name, info in config_class.model_fields.items():
        if mark in info.metadata:
            found.append(name)
        else:
            found += [
                f"{name}.{inner}" for section in _sections(info.annotation) for inner in marked_fields(mark, section)
            ]
    return tuple(dict.fromkeys(found))


def is_one_of(field: str, names: tuple[str, ...]) -> bool:
    """Whether a field, as train.num_steps, is among these fields, or in one of the sections among them."""
    return any(field == name or field.startswith(f"{name}.") for name in names)


def flatten(tree: Mapping) -> Iterable[tuple[str, Any]]:
    """(field, value) of each value in a tree of sections; the field is written section.field."""
    return ((".".join(keys), value) for keys, value in leaves(tree))


def leaves(tree: Mapping, *sections: str) -> Iterable[tuple[tuple[str, ...], Any]]:
    """(keys, value) of each value in a tree of sections. `sections`: the keys of the tree itself, if it is a part."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, *sections, str(key))
        else:
            yield (*sections, str(key)), value


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The classes of the sections that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]
