"""Stands in for pydantic in an export: the names that the model sources import, with plain frozen dataclasses.

Types and ranges were checked when the export was written. An unknown or a missing field is still a TypeError.
"""

from dataclasses import MISSING, dataclass, field

PositiveInt = int


class BaseModel:
    def __init_subclass__(cls, frozen: bool, extra: str):
        dataclass(frozen=frozen, kw_only=True)(cls)


def Field(default=MISSING, **checks):
    return field(default=default)


def model_validator(mode: str):
    return lambda method: method
