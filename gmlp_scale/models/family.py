"""What the config of a block family says of the family, so that no other file lists families or kinds."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

NumBlocks = Annotated[int, Field(ge=1, le=10_000)]
"""The paper's deepest model has 144. Without a limit a slip of the pen would keep even a dry run busy for ever."""


class FamilyConfig(BaseModel, frozen=True, extra="forbid"):
    """A family also has `kind` and its sizes, and `multiply_adds_per_block` for one forward pass of one sequence."""

    display_name: ClassVar[str]
    """Its name in a model card."""
    masks_padding: ClassVar[bool] = False
    """Whether its blocks take is_token_BN."""
    has_absolute_positions: ClassVar[bool] = False
    """Whether position embeddings are added to the tokens'."""
    can_be_causal: ClassVar[bool] = False
    """Whether its blocks take `causal`."""
    has_spatial_filters: ClassVar[bool] = False
    """Whether its blocks have a spatial weight W in `gating`."""
