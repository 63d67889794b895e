"""OptimizerConfig: the recipe's `optimizer` section. adamw.py and muon.py have the optimizers."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gmlp_scale.fields import CountFrom0, NotNegative, Positive, Share


class AdamwConfig(BaseModel, frozen=True, extra="forbid"):
    """The defaults are the main recipe's (section 4 of the paper)."""

    kind: Literal["adamw"] = "adamw"
    """AdamW for all parameters."""
    peak_learning_rate: Positive = 1e-4
    """The learning rate at the end of the warm-up. [no unit]"""
    schedule: Literal["linear", "cosine", "stable"] = "linear"
    """What the rate does after the warm-up. linear: it falls to 0 at the end of train.num_steps, as the paper's.
    cosine: the same along half a cosine. stable: it stays at its peak, and falls to 0 over the last decay_steps."""
    warmup_steps: CountFrom0 = 10_000
    """Steps over which the rate climbs from 0 to its peak, linearly. [steps]"""
    decay_steps: CountFrom0 = 0
    """For `stable` only. The steps at the end over which the rate falls; 0: it never does. [steps]"""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """How much of AdamW's mean of gradients, and of their squares, each step keeps. [fraction]"""
    eps: Positive = 1e-6
    """What AdamW adds to the root of the mean square, so that it never divides by 0. [no unit]"""
    weight_decay: NotNegative = 0.01
    """Each step takes this times the learning rate off the weights. On matrices only: not on LayerNorms, biases and the
    Toeplitz vector. [no unit]"""
    gradient_clipping: Positive | None = None
    """Largest global gradient norm; null never clips. [no unit]"""


class MuonConfig(AdamwConfig, frozen=True, extra="forbid"):
    """Muon for the matrices of the blocks; AdamW, with the fields above, for all other parameters."""

    kind: Literal["muon"] = "muon"
    """Muon for the matrices of the blocks, AdamW for the rest."""
    momentum: Share = 0.95
    """How much of Muon's mean of gradients each step keeps. [fraction]"""
    matrix_rate_ratio: Positive = 1.0
    """The learning rate of Muon's matrices over that of the rest. At 1 an update is about as large as AdamW's.
    [no unit]"""


def _with_kind(section: Any) -> Any:
    """Recipes and checkpoints from before there was a choice name no kind: they used AdamW."""
    return {"kind": "adamw"} | section if isinstance(section, dict) else section


OptimizerConfig = Annotated[AdamwConfig | MuonConfig, Field(discriminator="kind"), BeforeValidator(_with_kind)]
