"""The names of pydantic that the model sources use, as plain frozen dataclasses: an export does not need pydantic.

Types and ranges were checked where the export was written; unknown and missing fields are still TypeErrors.
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
