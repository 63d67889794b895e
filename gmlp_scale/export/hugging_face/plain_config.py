"""Stands in for pydantic in an export: the names that the model sources import, with plain frozen dataclasses.

Types and ranges were checked when the export was written. An unknown or a missing field is still a TypeError.
"""

from dataclasses import dataclass


class BaseModel:
    def __init_subclass__(cls, frozen: bool = True, extra: str = "forbid"):
        dataclass(frozen=frozen, kw_only=True)(cls)


def Field(**checks):
    return None


def BeforeValidator(function):
    return None


def model_validator(mode: str):
    return lambda method: method
