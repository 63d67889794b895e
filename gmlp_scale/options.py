"""Types for argparse: an option of a script takes what a recipe's field would."""

import argparse
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gmlp_scale.fields import Count, CountFrom0, Positive, what_is_needed


def option(annotation: Any) -> Callable[[str], Any]:
    """Reads what a field with this annotation takes, such as Count."""
    adapter = TypeAdapter(annotation)

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            needed = what_is_needed(error.errors()[0]["msg"])
            raise argparse.ArgumentTypeError(f"found {text}; needed: {needed}") from None

    return read


count, count_from_0, positive = option(Count), option(CountFrom0), option(Positive)
