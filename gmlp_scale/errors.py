"""The mistakes that a user can put right. Any other error is ours, and keeps its traceback."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(Exception):
    """A mistake that a user can put right. Its message says what was found, what is needed and what to change."""

    exit_code = 1
    """What a process leaves with. 1: the same command may pass later, as after a lost rank or another job in the run
    folder. 2: it would fail again. Clusters and launch/elastic.py restart a process that left with 1."""


class InputError(UserError, ValueError):
    """Something given cannot be used: an option, a recipe, data, a model, a folder."""

    exit_code = 2


class OtherRankError(UserError):
    """Another rank failed; its own message says why."""


class LostRankError(UserError):
    """A collective failed because a rank did not come to it."""


USER_ERRORS = (UserError, OSError)
"""The system's own errors name the file or the host, and say what it refused."""


def exit_code(error: Exception) -> int:
    """What a process leaves with after one of USER_ERRORS: 1 for a full disk, which may pass, 2 for a missing file."""
    fails_again = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    return 2 if isinstance(error, fails_again) else getattr(error, "exit_code", 1)


def validation_problems(error: "ValidationError") -> str:
    """What pydantic found, in one line: each field with what is wrong with it."""
    return "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()[:5])
