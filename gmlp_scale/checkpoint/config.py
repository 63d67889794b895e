"""CheckpointConfig: the recipe's `checkpoint` section."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel

from gmlp_scale.fields import Count


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    save_every_steps: Count
    """From one save to the next. A run also saves where it stops. [steps]"""
    keep_last: Count = 3
    """How many checkpoints stay on disk: the newest. [checkpoints]"""
    keep_every_steps: Count | None = None
    """The checkpoints of its multiples stay for good, beside the newest; null keeps none. [steps]"""
    on_full_disk: Literal["keep", "drop_oldest"] = "keep"
    """drop_oldest: where a save lacks room, the oldest checkpoints are deleted first, but never the newest one, nor
    those of `keep_every_steps`."""
    asynchronous: bool = True
    """Write in the background. False: a save returns once the checkpoint is complete, and raises if it failed."""

    def mistakes(self) -> Iterator[str]:
        if self.keep_every_steps and self.keep_every_steps % self.save_every_steps:
            yield (
                f"checkpoint.keep_every_steps: found {self.keep_every_steps}; must be a multiple of "
                f"checkpoint.save_every_steps = {self.save_every_steps}"
            )
